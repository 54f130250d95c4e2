"""Conversion of values to the JSON that the page reads: NaN is null, infinities are strings, and all text is ASCII."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agentsgym.texts import as_json, shown

_EXACT: Final = 2**53  # JavaScript represents every integer up to it


def number(value: Any) -> float | str | None:
    """Convert a number for JSON: NaN (unknown) to None, and infinities to ``"inf"`` and ``"-inf"``.

    >>> number(float("nan")), number(float("-inf")), number(0.5), number(2**60)
    (None, '-inf', 0.5, '1152921504606846976')
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -_EXACT <= value <= _EXACT else shown(value)
    if math.isfinite(value):
        return float(value)
    return None if math.isnan(value) else ("inf" if value > 0 else "-inf")


def numbers(values: Iterable[Any] | None) -> list[Any] | None:
    """Convert numbers for JSON; None stays None."""
    return None if values is None else [number(value) for value in values]


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean of the values that are not NaN, exactly if all are equal; None if there are none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    return known[0] if min(known) == max(known) else sum(known) / len(known)


def text_of(value: Any) -> str:
    """Convert any value to text: a string unchanged, None to an empty string, and everything else to JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(as_json(value), ensure_ascii=False, indent=1)


def truncate(text: str, limit: int) -> tuple[str, int]:
    """Return the first ``limit`` characters of a text, and the number of characters omitted.

    >>> truncate("abcdef", 4), truncate("abc", 4)
    (('abcd', 2), ('abc', 0))
    """
    return (text, 0) if len(text) <= limit else (text[:limit], len(text) - limit)


def dumped(value: Any) -> str:
    r"""Serialize a response as ASCII JSON, which can represent lone surrogates and cannot end an HTML element.

    >>> dumped({"text": "</script>\ud800"})
    '{"text":"\\u003c/script>\\ud800"}'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
