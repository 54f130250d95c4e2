"""Serialization of any Python value as JSON text: exactly if possible, and with a mark otherwise.

JSON values are written directly. Any other value becomes an object with a single key that begins with ``$``, such as
``{"$tuple": [1, 2]}``. A dict with such a key, or with keys that are not strings, becomes a list of pairs, ``{"$dict":
[[1, "one"]]}``. Reading never imports modules or calls user code.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from agentsgym.errors import StoreError
from agentsgym.texts import shown

_MAX_DEPTH: Final = 100
_TEXT_LIMIT: Final = 2000  # characters of the repr that is stored in place of a value
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_NUMERIC_KINDS: Final = "biuf"  # NumPy data types that are stored exactly: bool, int, unsigned, float
_TEXT_KINDS: Final = "US"  # NumPy data types that are stored as Python strings or bytes, or lists of them
_INT_RANGE = range(-(2**63), 2**63)
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Unkept:
    """The value read in place of one that could not be stored.

    Attributes:
        type_name: The name of its type, with the module.
        text: Its ``repr``, truncated if long; for a function or a class, its name.
    """

    type_name: str
    text: str


def to_json(value: Any, lost: list[str] | None = None) -> str:
    r"""Serialize a value as JSON text.

    >>> to_json({"board": (1, None), "score": float("-inf")})
    '{"board":{"$tuple":[1,null]},"score":{"$float":"-inf"}}'
    >>> from_json(to_json({(0, 1): "\ud800"}))
    {(0, 1): '\ud800'}
    """
    if type(value) is dict and not value:
        return "{}"
    return _ENCODER.encode(_Writer([] if lost is None else lost).write(value))


def from_json(text: str) -> Any:
    """Parse the output of :func:`to_json`."""
    try:
        return json.loads(text, object_hook=_read)
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise StoreError(f"a stored value cannot be read ({error}): {shown(text)}") from error


def messages_to_json(messages: Sequence[Mapping[str, Any]], lost: list[str]) -> str:
    """Serialize a conversation as :func:`to_json` does, but faster if it contains only text, as most do."""
    plain: Any = messages if type(messages) in {list, tuple} else [*messages]
    if type(plain) is list and all(
        type(one) is dict and len(one) == 2 and type(one.get("role")) is str and type(one.get("content")) is str
        for one in cast("list[dict[str, Any]]", plain)
    ):
        text = _ENCODER.encode(plain)
        if is_utf8(text):
            return text
    return to_json(plain, lost)


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, which UTF-8 cannot encode."""
    return text.isascii() or _SURROGATE.search(text) is None


class _Writer:
    """Converts a value to one that JSON represents."""

    def __init__(self, lost: list[str]) -> None:
        self._lost = lost
        self._open: set[int] = set()  # ids of the containers being written, since a container may contain itself

    def write(self, value: Any) -> Any:
        kind = cast("type[Any]", type(value))
        if value is None or kind is bool:
            return value
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return scalar(value)
        if id(value) in self._open or len(self._open) >= _MAX_DEPTH:
            return self._unkept(value)
        self._open.add(id(value))
        try:
            return self._container(value, kind)
        except Exception:  # noqa: BLE001  # a user's type may raise anything
            return self._unkept(value)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, kind: type[Any]) -> Any:
        if kind is list:
            return [self.write(item) for item in value]
        if kind is dict:
            if all(type(key) is str and key[:1] != "$" and is_utf8(key) for key in value):
                return {key: self.write(item) for key, item in value.items()}
            return {"$dict": [[self.write(key), self.write(item)] for key, item in value.items()]}
        if kind is tuple:
            return {"$tuple": [self.write(item) for item in value]}
        if kind in {set, frozenset}:
            return {f"${kind.__name__}": sorted((self.write(item) for item in value), key=_ENCODER.encode)}
        return self._other(value, kind)

    def _other(self, value: Any, kind: type[Any]) -> Any:
        """Convert a NumPy value, or an instance of a subclass of a built-in type."""
        if isinstance(value, np.generic | np.ndarray) and (array := cast("Any", value)).dtype.kind not in _TEXT_KINDS:
            if array.dtype.kind not in _NUMERIC_KINDS or array.dtype.itemsize > 8:
                return self._unkept(value)
            data = base64.b64encode(array.tobytes()).decode()
            if isinstance(value, np.generic):
                return {"$numpy": [array.dtype.str, data, self.write(array.item())]}
            return {"$array": [array.dtype.str, [*array.shape], data]}
        for base, as_plain in _PLAIN.items():
            if isinstance(value, base):
                plain = as_plain(value)
                self._lost.append(f"{kind.__qualname__} stored as {type(plain).__name__}")
                return {"$as": [_name(kind), self.write(plain)]}
        return self._unkept(value)

    def _unkept(self, value: Any) -> dict[str, Any]:
        is_read = isinstance(value, Unkept)  # read from a store, which did not contain the value
        name = value.type_name.rpartition(".")[2] if is_read else type(value).__qualname__
        self._lost.append(f"only the text of {name} was stored")
        if is_read:
            return {"$unkept": [value.type_name, value.text]}
        is_named = callable(value) and hasattr(value, "__qualname__")
        text = _name(value) if is_named else _ADDRESS.sub("", shown(value, _TEXT_LIMIT))
        return {"$unkept": [_name(cast("type[Any]", type(value))), _as_utf8(text)]}


def _as_utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _name(value: Any) -> str:
    module = getattr(value, "__module__", None)  # methods of built-in classes have no module
    return _as_utf8(f"{module}.{value.__qualname__}" if isinstance(module, str) else value.__qualname__)


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    is_usual = bits == struct.pack(">d", math.nan) or math.isinf(value)
    return {"$float": repr(value) if is_usual else bits.hex()}


_SCALARS: Final[dict[type[Any], Callable[[Any], Any]]] = {
    str: lambda text: text if is_utf8(text) else {"$str": text.encode("utf-8", "surrogatepass").hex()},
    int: lambda value: value if value in _INT_RANGE else {"$int": hex(value)},
    float: _float,
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
}
_PLAIN: Final[dict[type[Any], Callable[[Any], Any]]] = {
    str: str.__str__,
    bytes: bytes,
    np.ndarray: lambda array: array.tolist(),
    int: int.__int__,
    float: float.__float__,
    Mapping: dict,
    list: list,
    tuple: tuple,
}


def _read(value: dict[str, Any]) -> Any:
    if len(value) != 1:
        return value
    [(tag, given)] = value.items()
    return _READERS[tag](given) if tag[:1] == "$" else value


def _numpy_of(data_type: str, data: str) -> Any:
    kind = np.dtype(data_type)
    if kind.kind not in _NUMERIC_KINDS:
        raise ValueError(f"{data_type!r} is not a numeric data type")
    return np.frombuffer(base64.b64decode(data), dtype=kind)


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "$int": lambda text: int(text, 16),
    "$float": lambda text: (
        float(text) if text in {"nan", "inf", "-inf"} else struct.unpack(">d", bytes.fromhex(text))[0]
    ),
    "$bytes": base64.b64decode,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": lambda pairs: {key: item for key, item in pairs},  # noqa: C416  # each pair is a list of two items
    "$numpy": lambda given: _numpy_of(given[0], given[1])[0],
    "$array": lambda given: _numpy_of(given[0], given[2]).reshape(given[1]).copy(),
    "$as": lambda given: given[1],
    "$unkept": lambda given: Unkept(*given),
}
