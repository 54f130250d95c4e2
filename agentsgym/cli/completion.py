"""Completion in bash, which splits words at a colon: ``Arcade:Pon`` reaches the command as three words.

Here they become one again, and of what is offered the part that bash has behind the colon is printed.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, MutableMapping, Sequence
from typing import NamedTuple

_KIND, _WORDS, _INDEX = "_AGENTSGYM_COMPLETE", "COMP_WORDS", "COMP_CWORD"


class Joined(NamedTuple):
    """Words as a person typed them.

    Attributes:
        words: They.
        place: Which of them is completed.
        held: The beginning of that word that bash holds apart, up to its last colon; empty if it holds none.
    """

    words: list[str]
    place: int
    held: str


def joined_at_colons(words: Sequence[str], index: int) -> Joined:
    """Put words together again that bash split at colons.

    Args:
        words: As bash has them, each colon a word.
        index: Which of them is completed.

    >>> joined_at_colons(["agentsgym", "eval", "Arcade", ":", "Pon"], 4)
    Joined(words=['agentsgym', 'eval', 'Arcade:Pon'], place=2, held='Arcade:')
    """
    joined: list[str] = []
    held, goes_on = "", False
    for word in words[: index + 1]:
        is_colon = bool(word) and not word.strip(":")
        if joined and (is_colon or goes_on):
            held = joined[-1] + (word if is_colon else "")
            joined[-1] += word
        else:
            held = ""
            joined.append(word)
        goes_on = is_colon
    return Joined([*joined, *words[index + 1 :]], max(0, len(joined) - 1), held)


@contextlib.contextmanager
def whole_words(environment: MutableMapping[str, str] = os.environ) -> Generator[None]:
    """Let a command that bash asks for completions see whole words, and bash see what it can put in their place.

    Args:
        environment: Where bash says what it asks for.
    """
    index = environment.get(_INDEX, "")
    if environment.get(_KIND) != "complete_bash" or not index.isdecimal():
        yield
        return
    words = joined_at_colons(environment.get(_WORDS, "").split("\n"), int(index))
    environment[_WORDS], environment[_INDEX] = "\n".join(words.words), str(words.place)
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            yield
    finally:
        for line in offered.getvalue().splitlines():
            print(line.removeprefix(words.held))
