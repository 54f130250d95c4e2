"""Compare a final answer with the expected one."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable
from typing import Any, cast

from agentsgym.envs.thoughts import without_thoughts

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_BEFORE = "\"'`([{<*_~\\" + string.whitespace  # what may open an answer and says nothing
_BEHIND = "\"'`)]}>*_~\\.,;:!?" + string.whitespace  # no sign of a number, unit or name: 5%, C#, .5
_MOST_DIGITS = 400  # of a number that is compared by its value


def said(text: str) -> str:
    """Give what an answer says, without what it thought before.

    >>> said("<think>3 + 4</think> 7 ")
    '7'
    """
    return without_thoughts(text).strip()


def normalized(text: str) -> str:
    """Leave out what does not change an answer: case, quotes and punctuation around it, runs of white space.

    >>> normalized('  "The  Cat." '), normalized("C#"), normalized(".5")
    ('the cat', 'c#', '.5')
    """
    return " ".join(text.casefold().split()).lstrip(_BEFORE).rstrip(_BEHIND)


def is_exact(text: str, expected: Any) -> bool:
    """Whether an answer is the expected one, character for character, outer white space aside."""
    return text.strip() == str(expected).strip()


def is_same(text: str, expected: Any) -> bool:
    """Whether an answer is the expected one after normalization, numbers by their value.

    >>> is_same("1,200.0", 1200), is_same("The cat!", "the cat"), is_same("12", "1 2")
    (True, True, False)
    """
    if is_exact(text, expected):
        return True
    one, other = _number(text), _number(str(expected))
    if one is not None and other is not None:
        are_whole = one.is_integer() and other.is_integer()
        return one == other if are_whole else math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    given, wanted = normalized(text), normalized(str(expected))
    return bool(given) and given == wanted


MATCHES: dict[str, Callable[[str, Any], bool]] = {"normalized": is_same, "exact": is_exact}


def matches(text: str, expected: Any, how: str) -> bool:
    """Whether an answer is the expected one, or one of several.

    Args:
        text: The answer.
        expected: A text or a number, or a list of those that are right.
        how: A key of :data:`MATCHES`.
    """
    is_list = isinstance(expected, list | tuple)
    wanted = cast("Iterable[Any]", expected) if is_list else [expected]
    return any(MATCHES[how](text, one) for one in wanted)


def _number(text: str) -> float | None:
    """Read the number that an answer consists of; None if it says something else."""
    bare = normalized(text).strip(" $€£%")
    if not bare or len(bare) > _MOST_DIGITS or not _NUMBER.fullmatch(bare):
        return None
    try:
        value = float(bare.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
