"""Write values as the JSON that the page reads: NaN is null, infinities are texts, and all is ASCII."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

from agentsgym.texts import as_json, shown

_EXACT: Final = 2**53  # JavaScript represents every integer up to it


def number(value: Any) -> float | str | None:
    """A number for JSON: NaN, which means unknown, is None, and an infinity is ``"inf"`` or ``"-inf"``.

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
    """Numbers for JSON; None stays None."""
    return None if values is None else [number(value) for value in values]


def entries(turns: Sequence[Any]) -> list[Any]:
    """Numbers, or lists of numbers, for JSON."""
    return [numbers(cast("Sequence[Any]", entry)) if isinstance(entry, Sequence) else number(entry) for entry in turns]


def mean_of(values: Sequence[float]) -> float | None:
    """The mean of the values that are not NaN, exact if all are equal; None if there are none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    return known[0] if min(known) == max(known) else sum(known) / len(known)


def text_of(value: Any) -> str:
    """Any value as text: a text unchanged, None as the empty text, everything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(as_json(value), ensure_ascii=False, indent=1)


def cut(text: str, most: int) -> tuple[str, int]:
    """The beginning of a text, and the number of characters left out.

    >>> cut("abcdef", 4), cut("abc", 4)
    (('abcd', 2), ('abc', 0))
    """
    return (text, 0) if len(text) <= most else (text[:most], len(text) - most)


def dumped(value: Any) -> str:
    r"""Write an answer as ASCII, which can represent lone surrogates; nothing in it ends an element.

    >>> dumped({"text": "</script>\ud800"})
    '{"text":"\\u003c/script>\\ud800"}'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
