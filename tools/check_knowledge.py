"""Check ``knowledge.csv`` and ``properties.csv``: ``python -m tools.check_knowledge``.

Prints how each property divides the objects, the pairs that are hardest to tell apart, and how greedy play compares
with the lower bound; or every fault with its file and line, and then exits with status 1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentsgym.envs.TwentyQuestions import GreedyPlayer, TwentyQuestionsEnv, lower_bound_questions
from agentsgym.envs.TwentyQuestions.knowledge import (
    OBJECTS_FILE,
    PROPERTIES_FILE,
    VALUES,
    KnowledgeBase,
    form_faults,
    read_knowledge,
)
from agentsgym.envs.TwentyQuestions.language import Form, Language, Meaning
from agentsgym.envs.TwentyQuestions.parsing import Guess, Reader, normalize

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
    for key, counts in sorted(balance(knowledge).items(), key=lambda item: -entropy(item[1])):
        print(f"{key:14}", *(f"{value} {counts[value]:3}" for value in VALUES), f"{entropy(counts):.2f} bits", sep="  ")
    for number, one, other in closest_pairs(knowledge)[:5]:
        print(f"{one} and {other} differ in {number} properties")
    if options.objects == OBJECTS_FILE and options.properties == PROPERTIES_FILE:
        print(greedy_play("everyday", {}), greedy_play("rarer", {"hardcore": True}), sep="\n")
    return 0


def entropy(counts: Counter[str]) -> float:
    """Return the information in the answer to a question about a property, in bits, if all objects are equally likely.

    >>> entropy(Counter(yes=2, no=2))
    1.0
    """
    total = counts.total()
    return -sum(count / total * math.log2(count / total) for count in counts.values() if count)


def closest_pairs(knowledge: KnowledgeBase) -> list[tuple[int, str, str]]:
    """Return all pairs of objects with the number of properties in which they differ, the most similar first."""
    pairs = itertools.combinations(zip(knowledge.objects, _masks(knowledge), strict=True), 2)
    return sorted((differences(masks, others), one, other) for (one, masks), (other, others) in pairs)


def differences(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Count the properties in which two objects differ, from the masks of those that are "yes" and "sometimes"."""
    return ((one[0] ^ other[0]) | (one[1] ^ other[1])).bit_count()


def greedy_play(label: str, env_config: dict[str, Any]) -> str:
    """Play once for every object with the greedy player, and compare the number of turns with the lower bound."""
    env = TwentyQuestionsEnv(None, env_config)
    played = env.rollout([{"solution": name} for name in env.candidates.objects], GreedyPlayer(env))
    turns = [len(one.turns) for one in played]
    bound = lower_bound_questions(len(played), answers=3)
    return (
        f"{label} objects: greedy play wins {sum(bool(one.success) for one in played)} of {len(played)} games, in "
        f"{statistics.fmean(turns):.2f} turns on average and at most {max(turns)}; no "
        f"player can need fewer than {bound:.2f}"
    )


def _check_rows(knowledge: KnowledgeBase, path: Path) -> Iterator[str]:
    known = [*enumerate(zip(knowledge.objects.values(), _masks(knowledge), strict=True), FIRST_ROW_LINE)]
    for (line, (one, masks)), (other_line, (other, other_masks)) in itertools.combinations(known, 2):
        if differences(masks, other_masks) < MIN_DIFFERENCES:
            pair = f"{other.name!r} and {one.name!r} (line {line})"
            yield f"{path.name}:{other_line}: {pair} must differ in at least {MIN_DIFFERENCES} properties"


def _masks(knowledge: KnowledgeBase) -> list[tuple[int, int]]:
    """Return, for each object, the properties that are "yes" and those that are "sometimes" as bit masks."""
    bits = {key: 1 << i for i, key in enumerate(knowledge.properties)}
    return [
        (_mask(known.values, "yes", bits), _mask(known.values, "sometimes", bits))
        for known in knowledge.objects.values()
    ]


def _mask(values: Mapping[str, str], value: str, bits: Mapping[str, int]) -> int:
    return sum(bits[key] for key, each in values.items() if each == value)


def _check_names(knowledge: KnowledgeBase, language: Language, path: Path) -> Iterator[str]:
    reader = Reader(knowledge, language.read)
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
    owners: dict[Form, Meaning] = {}
    for line, entry in enumerate(knowledge.properties.values(), FIRST_ROW_LINE):
        for text, negates in language.phrases(entry):
            form, is_odd = language.form(text)
            owner = owners.setdefault(form, Meaning(key=entry.key, opposite=negates != is_odd))
            found, wanted = language.read(text), Meaning(key=entry.key, opposite=negates)
            if owner.key != entry.key:
                yield f"{path.name}:{line}: {text!r} is also a question of {owner.key}"
            elif found != (wanted,):
                shown = [f"{'not ' * meaning.opposite}{meaning.key}" for meaning in found]
                yield f"{path.name}:{line}: {text!r} is understood as {shown or 'nothing'}"
        for text in entry.neighbors:
            if any(meaning.key == entry.key for meaning in language.read(text)):
                yield f"{path.name}:{line}: {text!r} is understood as {entry.key}, although it is listed as a neighbor"


if __name__ == "__main__":
    sys.exit(main())
