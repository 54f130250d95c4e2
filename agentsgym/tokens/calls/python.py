"""Parse calls that are written as Python: ``[look(at='door', times=2), wait()]``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from agentsgym.tokens.calls.values import (
    MAX_CALLS,
    WORDS,
    MalformedCallError,
    literal,
    malformed_call,
    read_json,
    skip_space,
    tool_call,
    whole_json,
)
from agentsgym.types import ToolCall

ReadString = Callable[[str, int], tuple[str, int]]
"""(text, index of an opening quote) → the string, and the index after it."""


def python_calls(text: str, read_string: ReadString) -> list[ToolCall]:
    """Parse calls written as a Python list, ``[look(at='door', times=2), wait()]``, each separately.

    A malformed call does not affect later calls: parsing resumes at the next call.

    >>> [(call.name, call.arguments) for call in python_calls("[look(at='Bob's', times=2), wait()]", bare_string)]
    [('look', {'at': "Bob's", 'times': 2}), ('wait', {})]
    """
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("[") and inner.endswith("]") else inner
    calls: list[ToolCall] = []
    position = skip_space(inner, 0)
    while position < len(inner) and len(calls) <= MAX_CALLS:
        name = _CALL_HEAD.match(inner, position)
        try:
            arguments, position = _arguments(inner, position, name, read_string)
            calls.append(tool_call(name[1] if name else "", arguments))
            separator = _BETWEEN_CALLS.match(inner, position)
            position = separator.end() if separator else len(inner)
        except MalformedCallError as error:
            calls.append(malformed_call(error, name[1] if name else ""))
            later = _LATER_CALL.search(inner, position if error.position is None else error.position)
            position = len(inner) if later is None else later.end()
    return calls


def bare_string(text: str, start: int) -> tuple[str, int]:
    """Parse a string without escapes: it ends at a quote that is followed by the end of the argument or of the call."""
    quote = text[start]
    end = re.compile(quote + _AFTER_STRING).search(text, start + 1)
    if end is None:
        raise MalformedCallError("has a string that is not closed")
    value = text[start + 1 : end.start()]
    head = _LATER_CALL.search(value)  # another call, whose string this quote closes
    if head is not None and re.compile(r"\w\s*=\s*" + quote).search(value, head.end()) is not None:
        raise MalformedCallError("has a string that is not closed before the next call")
    return value, end.start() + 1


def escaped_string(text: str, start: int) -> tuple[str, int]:
    r"""Parse a string with the escapes of Python.

    >>> escaped_string(r"'it\'s\nfine', 2", 0)
    ("it's\nfine", 13)
    """
    found = _ESCAPED_STRING.match(text, start)
    if found is None:
        raise MalformedCallError("has a string that is not closed")
    value = _ESCAPE.sub(
        lambda one: chr(int(one["code"][1:], 16)) if one["code"] else _ESCAPES.get(one["letter"], one[0]),
        found[0][1:-1],
    )
    if not value.isascii() and _HALF_PAIR.search(value):
        raise MalformedCallError("has a string that contains half of a surrogate pair")
    return value, found.end()


def _arguments(
    text: str, position: int, name: re.Match[str] | None, read_string: ReadString
) -> tuple[dict[str, Any], int]:
    """Parse arguments up to the closing parenthesis; return them and the index after it."""
    if name is None:
        raise MalformedCallError("must be written as name(argument=value)")
    arguments: dict[str, Any] = {}
    position = skip_space(text, name.end())
    while not text.startswith(")", position):
        try:
            position = _argument(text, position, arguments, read_string)
        except MalformedCallError as error:
            error.position = len(text[:position].rstrip(", \t\n"))  # the next call may begin after the last comma
            raise
    return arguments, position + 1


def _argument(text: str, start: int, arguments: dict[str, Any], read_string: ReadString) -> int:
    """Parse one argument into ``arguments``; return the index after it and its comma."""
    key = _KEY.match(text, start)
    if key is None:
        raise MalformedCallError("gives an argument without its name: write name(argument=value)")
    if key[1] in arguments:
        raise MalformedCallError(f"gives {key[1]!r} twice")
    arguments[key[1]], position = _value(text, key.end(), read_string)
    separator = _SEPARATOR.match(text, position)
    if separator is None:
        raise MalformedCallError(f"has no ',' or ')' after its argument {key[1]!r}")
    return separator.end()


def _value(text: str, start: int, read_string: ReadString) -> tuple[Any, int]:
    first = text[start : start + 1]
    if first in {"'", '"'}:
        return read_string(text, start)
    if first in {"[", "{"}:
        try:
            return read_json(text, start)
        except MalformedCallError as error:
            for end in _CLOSERS.finditer(text, start):  # it may be a Python literal
                written = text[start : end.end()]
                if written.count(first) == written.count("]" if first == "[" else "}"):
                    return literal(written, error), end.end()
            raise
    word = _WORD.match(text, start)
    written = word[0].strip() if word else ""
    return (WORDS[written] if written in WORDS else whole_json(written)), start + len(word[0] if word else "")


_CALL_HEAD = re.compile(r"\s*([\w./-]+)\(")
_LATER_CALL = re.compile(r",\s*(?=[\w./-]+\(\s*(?:\)|\w+\s*=))")
_BETWEEN_CALLS = re.compile(r"\s*,?\s*")
_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_SEPARATOR = re.compile(r"\s*,\s*|\s*(?=\))")
_AFTER_STRING = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w./-]+\(|\]?\s*$)))"
_ESCAPED_STRING = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:(?P<code>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|(?P<letter>.))", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")
_WORD = re.compile(r"[^,)]*")
_CLOSERS = re.compile(r"[\]}]")
