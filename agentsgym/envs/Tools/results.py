"""Convert any return value or exception of a tool into text of bounded length for the agent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from agentsgym.credit.components import GivenReward
from agentsgym.texts import sentence_of, shown

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NOT_TEXT = re.compile(r"<.* at 0x[0-9a-fA-F]+>|(?:bytearray\()?b['\"].*\\x[89a-f].*")  # images, bare objects, bytes
_MAX_ITEMS = 1000  # from an iterator, which may be infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one call.

    Attributes:
        content: The text for the agent.
        reward: The reward of the call itself, a number or a dict by name, in addition to ``_reward_call``.
        done: Whether the call ends the episode.
        failed: Whether the call failed: the tool raised or took too long, or the call could not be made.
        success: Whether the task is solved, for a call that ends the episode; None if unknown.
    """

    content: str
    reward: GivenReward = 0.0
    done: bool = False
    failed: bool = False
    success: bool | None = None


def failed_result(sentence: str) -> ToolResult:
    """Make the result of a failed call."""
    return ToolResult(content=f"Error: {sentence}", failed=True)


def result_of_exception(error: BaseException, max_length: int | None = None) -> ToolResult:
    """Make the result of a call whose tool raised.

    >>> result_of_exception(ZeroDivisionError("division by zero")).content
    'Error: division by zero (ZeroDivisionError)'
    """
    text, kind = sentence_of(error, max_length or 10_000), type(error).__name__
    return failed_result(text if text == kind else f"{text} ({kind})")


def as_text(value: Any) -> str:
    r"""Convert a return value to text: a string unchanged, other values to JSON, or to ``repr`` if that is impossible.

    Iterators are consumed, up to 1000 items. A sentence replaces a value that is not text, such as an image; memory
    addresses, which differ between runs, are removed.

    >>> as_text({"price": 3, "sizes": (1, 2)}), as_text(None), as_text("3\n")
    ('{"price": 3, "sizes": [1, 2]}', 'null', '3\n')
    """
    if isinstance(value, str):
        text = str.__str__(value)
    else:
        read = [*islice(cast("Iterator[Any]", value), _MAX_ITEMS)] if isinstance(value, Iterator) else value
        try:
            text = _ENCODER.encode(read)
        except (TypeError, ValueError, RecursionError):  # keys that are not strings, cycles
            text = _as_repr(read, 10_000)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()  # lone surrogates


def _as_repr(value: Any, limit: int = 200) -> str:
    written = shown(value, limit)
    if _NOT_TEXT.fullmatch(written):
        return f"[a value of type {type(value).__name__}, which cannot be shown as text]"
    return _ADDRESS.sub("", written)


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_as_repr)  # created once, since creation is slow


def cut(text: str, max_length: int | None) -> str:
    r"""Truncate a text to its first ``max_length`` characters, and append a note.

    >>> cut("abcdef", 4)
    'abcd\n[cut: the first 4 of 6 characters]'
    """
    if max_length is None or len(text) <= max_length:
        return text
    return f"{text[:max_length]}\n[cut: the first {max_length} of {len(text)} characters]"
