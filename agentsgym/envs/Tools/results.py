"""Turn whatever a tool returns or raises into a text of bounded length for the agent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from agentsgym.texts import sentence_of, shown

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_ITEMS = 1000  # of an iterator, which may have no end


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came of one call.

    Attributes:
        content: What the agent reads.
        reward: What the call itself is paid, beside ``_reward_call``.
        done: Whether it ends the episode.
        failed: Whether the call failed: the tool raised or took too long, or the call could not be made.
        success: Whether the task is solved, where a call that ends the episode knows; None if it does not say.
    """

    content: str
    reward: float = 0.0
    done: bool = False
    failed: bool = False
    success: bool | None = None


def failed(sentence: str) -> ToolResult:
    """Make the result of a call that failed."""
    return ToolResult(content=f"Error: {sentence}", failed=True)


def raised(error: BaseException, max_length: int | None = None) -> ToolResult:
    """Make the result of a call whose tool raised.

    >>> raised(ZeroDivisionError("division by zero")).content
    'Error: division by zero (ZeroDivisionError)'
    """
    text, kind = sentence_of(error, max_length or 10_000), type(error).__name__
    return failed(text if text == kind else f"{text} ({kind})")


def as_text(value: Any) -> str:
    r"""Write a tool's return value: a str as it is, everything else as JSON, as ``repr`` where JSON has no form.

    What an iterator gives is read, the first 1000 of it; addresses in memory, which no two plays share, are left out.

    >>> as_text({"price": 3, "sizes": (1, 2)}), as_text(None), as_text("3\n")
    ('{"price": 3, "sizes": [1, 2]}', 'null', '3\n')
    """
    if isinstance(value, str):
        text = str.__str__(value)
    else:
        read = [*islice(cast("Iterator[Any]", value), _MOST_ITEMS)] if isinstance(value, Iterator) else value
        try:
            text = _ENCODER.encode(read)
        except (TypeError, ValueError, RecursionError):  # keys that are no text, circles
            text = _as_repr(read, 10_000)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()  # half a surrogate pair


def _as_repr(value: Any, limit: int = 200) -> str:
    return _ADDRESS.sub("", shown(value, limit))


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_as_repr)  # made once: that takes longer than a short text


def cut(text: str, max_length: int | None) -> str:
    r"""Cut a text to its first ``max_length`` characters, and say so behind them.

    >>> cut("abcdef", 4)
    'abcd\n[cut: the first 4 of 6 characters]'
    """
    if max_length is None or len(text) <= max_length:
        return text
    return f"{text[:max_length]}\n[cut: the first {max_length} of {len(text)} characters]"
