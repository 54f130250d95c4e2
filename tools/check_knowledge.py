"""Check ``knowledge.csv`` and ``properties.csv``: ``python -m tools.check_knowledge``.

Prints how each property divides the objects, or every fault with its file and line, and then exits with status 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentsgym.envs.TwentyQuestions.knowledge import (
    OBJECTS_FILE,
    PROPERTIES_FILE,
    VALUES,
    KnowledgeBase,
    form_faults,
    read_knowledge,
)
from agentsgym.envs.TwentyQuestions.language import Language, Meaning
from agentsgym.envs.TwentyQuestions.parsing import Guess, Reader, core, normalize

FIRST_ROW_LINE = 2
MIN_DIFFERENCES = 2  # by which two objects are told apart


def check_files(objects_path: Path = OBJECTS_FILE, properties_path: Path = PROPERTIES_FILE) -> list[str]:
    """Return every error in the two files, with its line; the meaning is checked only once the format is valid."""
    found = [*form_faults(objects_path, properties_path)]
    if found:
        return found
    knowledge = read_knowledge(objects_path, properties_path)
    found = [*_check_rows(knowledge, objects_path)]
    for key, counts in balance(knowledge).items():
        if not (counts["yes"] and counts["no"]):
            found.append(f"{objects_path.name}:1: {key} must be yes for some object and no for another")
    language = Language(knowledge)
    found += _check_names(knowledge, language, objects_path)
    return [*found, *_check_questions(knowledge, language, properties_path)]


def balance(knowledge: KnowledgeBase) -> dict[str, Counter[str]]:
    """Count how often each value occurs, by property."""
    return {key: Counter(known.values[key] for known in knowledge.objects.values()) for key in knowledge.properties}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the files named on the command line, by default the packaged ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="?", type=Path, default=OBJECTS_FILE)
    parser.add_argument("properties", nargs="?", type=Path, default=PROPERTIES_FILE)
    options = parser.parse_args(arguments)
    found = check_files(options.objects, options.properties)
    if found:
        print(*found, sep="\n", file=sys.stderr)
        return 1
    knowledge = read_knowledge(options.objects, options.properties)
    print(f"{len(knowledge.objects)} objects, {len(knowledge.properties)} properties: no fault")
    for key, counts in balance(knowledge).items():
        print(f"{key:12}", *(f"{value} {counts[value]:3}" for value in VALUES), sep="  ")
    return 0


def _check_rows(knowledge: KnowledgeBase, path: Path) -> Iterator[str]:
    known = [
        (line, it, _mask(it.values, "yes"), _mask(it.values, "sometimes"))
        for line, it in enumerate(knowledge.objects.values(), FIRST_ROW_LINE)
    ]
    for (line, one, yes, sometimes), (other_line, other, other_yes, other_sometimes) in itertools.combinations(
        known, 2
    ):
        if ((yes ^ other_yes) | (sometimes ^ other_sometimes)).bit_count() < MIN_DIFFERENCES:
            pair = f"{other.name!r} and {one.name!r} (line {line})"
            yield f"{path.name}:{other_line}: {pair} must differ in at least {MIN_DIFFERENCES} properties"


def _mask(values: Mapping[str, str], value: str) -> int:
    """Return the properties with a value as bits, in order."""
    return sum(1 << bit for bit, each in enumerate(values.values()) if each == value)


def _check_names(knowledge: KnowledgeBase, language: Language, path: Path) -> Iterator[str]:
    reader = Reader(knowledge, language)
    owners: dict[str, str] = {}
    for line, known in enumerate(knowledge.objects.values(), FIRST_ROW_LINE):
        for name in dict.fromkeys(known.names):
            owner = owners.setdefault(normalize(name), known.name)
            if owner != known.name or not name:
                yield f"{path.name}:{line}: the name {name!r} is empty or also a name of {owner!r}"
            elif reader.canonical(name) != known.name:
                yield f"{path.name}:{line}: {name!r} is parsed as {reader.canonical(name)!r}"
        if reader.parse(known.guess, known.name) != Guess(name=known.name):
            yield f"{path.name}:{line}: the guess {known.guess!r} is parsed as a question"


def _check_questions(knowledge: KnowledgeBase, language: Language, path: Path) -> Iterator[str]:
    asked: dict[str, str] = {}
    for line, entry in enumerate(knowledge.properties.values(), FIRST_ROW_LINE):
        owner = asked.setdefault(core(normalize(entry.question)), entry.key)
        if owner != entry.key:
            yield f"{path.name}:{line}: {entry.question!r} is also the question of {owner}"
        for text, negates in [(entry.question, False), *((t, n) for t, n, is_key in language.phrases(entry) if is_key)]:
            wanted = Meaning(key=entry.key, opposite=negates)
            found = language.read(f"it {text}")
            if found != (wanted,):
                shown = [f"{'not ' * meaning.opposite}{meaning.key}" for meaning in found]
                yield f"{path.name}:{line}: {text!r} is understood as {shown or 'nothing'}"


if __name__ == "__main__":
    sys.exit(main())
