"""Completion in bash, which splits words at colons: ``Arcade:Pon`` reaches the command as three words.

This module joins these words again, and prints only the part of each completion after the last colon.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, MutableMapping, Sequence

_KIND, _WORDS, _INDEX = "_AGENTSGYM_COMPLETE", "COMP_WORDS", "COMP_CWORD"


def joined_at_colons(words: Sequence[str], index: int) -> tuple[list[str], int, str]:
    """Join words that bash split at colons.

    Returns:
        The words as they were typed, the index of the word to complete, and the part of that word up to its last colon,
        which bash keeps separate; empty if there is none.

    >>> joined_at_colons(["agentsgym", "eval", "Arcade", ":", "Pon"], 4)
    (['agentsgym', 'eval', 'Arcade:Pon'], 2, 'Arcade:')
    """
    joined: list[str] = []
    held, is_after_colon = "", False
    for word in words[: index + 1]:
        is_colon = bool(word) and not word.strip(":")
        if joined and (is_colon or is_after_colon):
            held = joined[-1] + (word if is_colon else "")
            joined[-1] += word
        else:
            held = ""
            joined.append(word)
        is_after_colon = is_colon
    return [*joined, *words[index + 1 :]], max(0, len(joined) - 1), held


@contextlib.contextmanager
def whole_words(environment: MutableMapping[str, str] = os.environ) -> Generator[None]:
    """During completion in bash, pass joined words to the command, and print completions for bash's split words."""
    index = environment.get(_INDEX, "")
    if environment.get(_KIND) != "complete_bash" or not index.isdecimal():
        yield
        return
    words, place, held = joined_at_colons(environment.get(_WORDS, "").split("\n"), int(index))
    environment[_WORDS], environment[_INDEX] = "\n".join(words), str(place)
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            yield
    finally:
        for line in offered.getvalue().splitlines():
            print(line.removeprefix(held))
