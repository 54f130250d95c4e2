"""Compare a final answer with the expected one."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, cast

from agentsgym.envs.shared.numbers import as_number

_LEADING = "\"'`([{<*_~\\" + string.whitespace  # leading characters to ignore
_TRAILING = "\"'`)]}>*_~\\.,;:!?" + string.whitespace  # never the end of a number, unit or name, such as 5%, C# or .5
_RELATIVE_TOLERANCE = Fraction(1, 10**9)  # relative tolerance, for numbers with decimals
_ABSOLUTE_TOLERANCE = Fraction(1, 10**12)


def normalized(text: str) -> str:
    """Normalize case, surrounding quotes and punctuation, and runs of whitespace.

    >>> normalized('  "The  Cat." '), normalized("C#"), normalized(".5")
    ('the cat', 'c#', '.5')
    """
    return " ".join(text.casefold().split()).lstrip(_LEADING).rstrip(_TRAILING)


def is_exact(text: str, expected: Any) -> bool:
    """Whether an answer equals the expected one, character for character, except for outer whitespace."""
    return text.strip() == str(expected).strip()


def is_same(text: str, expected: Any) -> bool:
    """Whether an answer equals the expected one after normalization; numbers are compared by value, integers exactly.

    >>> is_same("1,200.0", 1200), is_same("The cat!", "the cat"), is_same("12", "1 2"), is_same("10", 11)
    (True, True, False, False)
    """
    if is_exact(text, expected):
        return True
    one, other = _number(text), _number(str(expected))
    if one is not None and other is not None:
        distance = abs(one - other)
        if isinstance(expected, float) and abs(one - Fraction(expected)) <= Fraction(math.ulp(expected)) / 2:
            return True
        if one.denominator == other.denominator == 1:
            return distance == 0
        return distance <= max(_RELATIVE_TOLERANCE * max(abs(one), abs(other)), _ABSOLUTE_TOLERANCE)
    given, wanted = normalized(text), normalized(str(expected))
    return bool(given) and given == wanted


MATCHES: dict[str, Callable[[str, Any], bool]] = {"normalized": is_same, "exact": is_exact}


def matches(text: str, expected: Any, how: str) -> bool:
    """Whether an answer matches the expected one, or any of several expected ones.

    Args:
        text: The answer.
        expected: A text, a number, or a list of accepted texts and numbers.
        how: A key of :data:`MATCHES`.
    """
    is_list = isinstance(expected, list | tuple)
    wanted = cast("Iterable[Any]", expected) if is_list else [expected]
    return any(MATCHES[how](text, one) for one in wanted)


def _number(text: str) -> Fraction | None:
    """Parse an answer that is a single number, exactly; None for any other answer."""
    number = as_number(normalized(text).strip(" $€£%"))
    return None if number is None else number.value
