"""Find candidate moves in what a game shows: its lists of moves, its examples, and common formats."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LISTED = re.compile(r"(?:available|legal|valid|possible)[^\n]*", re.IGNORECASE)
_MOST_NUMBERS = 26


def listed_moves(text: str) -> list[str]:
    """The moves that a text lists as available, in order.

    >>> listed_moves("Available Moves: '[0]', '[4]'")
    ['[0]', '[4]']
    """
    return list(dict.fromkeys(move for line in _LISTED.findall(text) for move in _BRACKETS.findall(line)))


def example_moves(text: str) -> list[str]:
    """All bracketed text, in order."""
    return list(dict.fromkeys(_BRACKETS.findall(text)))


def filled_moves(examples: list[str]) -> list[str]:
    """Replace the placeholders of examples, one or two per move, with numbers.

    >>> filled_moves(["[play X]"])[:2]
    ['[play 0]', '[play 1]']
    """
    found: list[str] = []
    for example in examples:
        verb, *places = example.strip("[]").split()
        if verb.isalpha() and len(verb) > 1 and len(places) == 1:
            found += [f"[{verb} {number}]" for number in range(_MOST_NUMBERS)]
        elif verb.isalpha() and len(verb) > 1 and len(places) == 2:
            found += [f"[{verb} {one} {other}]" for one in range(6) for other in range(6)]
    return list(dict.fromkeys(found))


def usual_moves() -> Iterator[str]:
    """Numbers and pairs of numbers in brackets, the common format of board games."""
    yield from (f"[{number}]" for number in range(_MOST_NUMBERS))
    yield from (f"[{row} {column}]" for row in range(10) for column in range(10))
    yield from (f"[{row},{column}]" for row in range(8) for column in range(8))
    yield from (f"[{column}{row}]" for column in "abcdefgh" for row in range(1, 9))
