"""List single words that are read as a property although no question listed for it has them.

``python -m tools.odd_words FOLDER`` fills short questions with every whole word in the vocabulary of a tokenizer in a
folder. What it prints is read through rows of ``wordings.csv`` or exchanged letters; odd words among it are faults.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.envs.TwentyQuestions.language import load_language

TEMPLATES = (
    "is it {}", "is it a {}", "does it {}", "does it have {}", "can you {} it", "is it made of {}", "is it in the {}",
    "is it used to {}", "is it used for {}", "do people have {}", "does it need {}",
)  # fmt: skip


def odd_words(words: Iterable[str]) -> Mapping[str, list[str]]:
    """Return, by template and property, the words that are understood but occur in no question of the property."""
    language, known = load_language(), load_knowledge()
    listed = {
        key: {word for text, _ in language.phrases(entry) for word in re.findall(r"\w+", text)}
        for key, entry in known.properties.items()
    }
    found: defaultdict[str, list[str]] = defaultdict(list)
    for word in sorted({*words}):
        for template in TEMPLATES:
            for meaning in language.read(template.format(word)):
                if meaning.key in listed and not {word, word.removesuffix("s"), f"{word}s"} & listed[meaning.key]:
                    found[f"{template}: {'not ' * meaning.opposite}{meaning.key}"].append(word)
    return dict(sorted(found.items()))


def main() -> None:
    """Print the words."""
    from transformers import AutoTokenizer  # noqa: PLC0415  # importing the module must stay fast

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder with a tokenizer")
    untyped: Any = AutoTokenizer
    vocabulary: dict[str, int] = untyped.from_pretrained(parser.parse_args().folder).get_vocab()
    words = {word[1:].lower() for word in vocabulary if re.fullmatch(r"[Ġ▁][a-zA-Z]{3,}", word)}
    for place, odd in odd_words(words).items():
        print(f"{place}: {' '.join(odd)}")


if __name__ == "__main__":
    main()
