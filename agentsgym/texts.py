"""Convert values and errors from user code to short printable text, or to JSON.

Values from an environment, an agent or a server may be megabytes long, may raise when they are converted to text, and
may contain escape sequences.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

_MAX_DEPTH = 6  # of nested containers, as in reprlib
_NOTE_BYTES = 60
_PLAIN = (BaseException.__str__, KeyError.__str__)
_MAX_JSON_DEPTH = 32
_MAX_BITS = 3000  # of an int whose digits are shown; Python raises for more than 4,300 digits
# C0 and C1 except tab and newline; marks and overrides of the writing direction; line separators that only some
# terminals support; unpaired surrogates.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(value: object, limit: int = 200) -> str:
    r"""Format a value as one line of at most ``limit`` characters: its ``repr`` if that is short enough.

    Only the shown part of a container is formatted. Never raises, even if the value's ``repr`` does.

    >>> shown({"done": False, "seen": range(3)})
    "{'done': False, 'seen': range(0, 3)}"
    >>> shown("a\x1b[2Jb" * 1000, limit=16)
    "'a\\x1b[2Jba\\x1b…"
    """
    pieces: list[str] = []
    try:
        missing = limit + 1
        for piece in _pieces(value, missing, 0):
            pieces.append(_one_line(piece[:missing]))
            missing -= len(pieces[-1])
            if missing <= 0:
                break
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # a container may raise, e.g. when another thread changes it
        pieces.append(_no_repr(value, error))
    return _cut("".join(pieces), limit)


def sentence_of(error: BaseException, limit: int = 1000) -> str:
    """Return the text of an error, cut to ``limit`` characters.

    >>> sentence_of(ValueError("gone"))
    'gone'
    """
    try:
        (argument,) = error.args if len(error.args) == 1 else (error.args,)
        kind = type(error).__str__
        is_long = isinstance(argument, dict | list | tuple | set) and error.args and kind in _PLAIN
        if is_long or (isinstance(argument, str) and kind is KeyError.__str__):
            text = shown(cast("object", argument), limit + 1)  # formats only as much as is shown
        else:
            text = str(error)
        return _cut(visible(text[: limit + 1]), limit)
    except KeyboardInterrupt:
        raise
    except BaseException as other:  # noqa: BLE001  # user code, as above
        return f"{_type_name(error)}, whose text cannot be read: its __str__ raised {_type_name(other)}"


def visible(text: str) -> str:
    r"""Escape characters that a terminal would interpret or not show, as Python does.

    Newlines and tabs stay. Everything else that moves the cursor, rings, colors or changes the writing direction is
    escaped: control characters, escape sequences, bidirectional marks and overrides, line separators, and unpaired
    surrogates.

    >>> print(visible("\x1b[31mred\x1b[0m"))
    \x1b[31mred\x1b[0m
    """
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


def as_json(value: object, inside: tuple[int, ...] = ()) -> Any:
    """Convert a value to JSON types: dicts with string keys, lists, strings, ints, finite floats, booleans and None.

    NaN becomes None, and infinity the string ``"inf"`` or ``"-inf"``; a NumPy array or scalar becomes lists and
    numbers; a set becomes a list. Other values become strings, as formatted by :func:`shown`.

    >>> as_json({"won": True, 3: (1, float("nan")), "at": range(2)})
    {'won': True, '3': [1, None], 'at': 'range(0, 2)'}
    """
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return str.__str__(value)  # for an enum member, its value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_BITS else shown(value)
    return _json_container(value, inside)


def _json_container(value: Any, inside: tuple[int, ...]) -> Any:
    if id(value) in inside or len(inside) >= _MAX_JSON_DEPTH:
        return shown(value)
    within = (*inside, id(value))
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {as_json(key) if isinstance(key, str) else shown(key): as_json(item, within) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item, within) for item in cast("Iterable[Any]", value)]
    if callable(getattr(value, "tolist", None)):  # NumPy arrays and torch tensors
        return as_json(value.tolist(), within)
    return shown(value)


def shortened(text: str, max_bytes: int, *, tail: float = 0.5) -> str:
    """Remove the middle of a text that is longer than ``max_bytes`` as UTF-8.

    Args:
        text: Any text.
        max_bytes: Maximum size of the result in bytes; at least 64.
        tail: The fraction of the result that is taken from the end of the text.
    """
    if len(text) * 4 <= max_bytes:
        return text
    if len(text) <= max_bytes and len(text.encode(errors="backslashreplace")) <= max_bytes:
        return text
    end = int((max_bytes - _NOTE_BYTES) * tail)
    begin = max_bytes - _NOTE_BYTES - end
    head = text[:begin].encode(errors="backslashreplace")[:begin].decode(errors="ignore")
    rest = text[-end:].encode(errors="backslashreplace")[-end:].decode(errors="ignore") if end else ""
    return f"{head} … {len(text) - len(head) - len(rest)} characters are omitted … {rest}".rstrip(" ")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _type_name(value: object) -> str:
    return _one_line(type(value).__name__[:100])


def _one_line(text: str) -> str:
    """Escape unprintable characters, including newlines, as the ``repr`` of a str does."""
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _pieces(value: Any, limit: int, depth: int) -> Iterator[str]:
    """Yield the ``repr`` of a value in pieces, of which only the first ``limit`` characters will be used."""
    kind = cast("type[Any]", type(value))
    if kind is str or kind is bytes:
        yield repr(value[:limit])
    elif kind is int and value.bit_length() > _MAX_BITS:
        yield f"<an int of {value.bit_length()} bits>"
    elif writer := _container(value, kind):
        yield from writer(value, limit, depth + 1) if depth < _MAX_DEPTH else "…"
    else:
        try:
            written = str(repr(value))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # user code may raise anything
            written = _no_repr(value, error)
        yield written


def _no_repr(value: object, error: BaseException) -> str:
    return f"<{_type_name(value)} object: its repr raised {_type_name(error)}>"


def _container(value: Any, kind: type[Any]) -> Callable[[Any, int, int], Iterator[str]] | None:
    """The function that formats a container; None if the value is not a container or has a custom repr."""
    for base, writer in _WRITERS.items():
        if isinstance(value, base) and kind.__repr__ is base.__repr__:
            return writer
    written_by = getattr(getattr(kind.__repr__, "__wrapped__", None), "__code__", None)
    if dataclasses.is_dataclass(kind) and getattr(written_by, "co_filename", "") == "<string>":
        return _dataclass_pieces  # its repr was generated by dataclasses
    return None


def _dict_pieces(value: dict[Any, Any], limit: int, depth: int) -> Iterator[str]:
    pairs = (
        chain(_pieces(key, limit, depth), (": ",), _pieces(item, limit, depth))
        for key, item in islice(value.items(), limit)
    )
    yield from _joined("{", pairs, "}")


def _item_pieces(value: Any, limit: int, depth: int) -> Iterator[str]:
    name = type(value).__name__
    if isinstance(value, list):
        begin, end = "[", "]"
    elif isinstance(value, tuple):
        begin, end = "(", ",)" if len(cast("tuple[Any, ...]", value)) == 1 else ")"
    else:
        begin, end = ("{", "}") if name == "set" else (f"{name}({{", "})")
    if isinstance(value, list | tuple) or value:
        items = cast("Iterable[Any]", value)
        yield from _joined(begin, (_pieces(item, limit, depth) for item in islice(items, limit)), end)
    else:
        yield f"{name}()"


def _dataclass_pieces(value: Any, limit: int, depth: int) -> Iterator[str]:
    shown_fields = (
        chain((f"{one.name}=",), _pieces(getattr(value, one.name), limit, depth))
        for one in dataclasses.fields(value)
        if one.repr
    )
    yield from _joined(f"{type(value).__qualname__}(", shown_fields, ")")


def _joined(begin: str, items: Iterable[Iterator[str]], end: str) -> Iterator[str]:
    yield begin
    for index, item in enumerate(items):
        if index:
            yield ", "
        yield from item
    yield end


_WRITERS: dict[type[Any], Callable[[Any, int, int], Iterator[str]]] = {
    dict: _dict_pieces,
    list: _item_pieces,
    tuple: _item_pieces,
    set: _item_pieces,
    frozenset: _item_pieces,
}
