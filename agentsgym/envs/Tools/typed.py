"""Convert the JSON values of a call to a function's annotated types: members of an Enum, tuples."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast


def typed_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the hints of the arguments that need conversion; none if the hints cannot be resolved."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  # a hint may be any expression
        return {}
    return {name: hint for name, hint in hints.items() if name != "return" and _differs(hint)}


def typed(arguments: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of a call that fits its schema."""
    return {name: as_hinted(value, hints[name]) if name in hints else value for name, value in arguments.items()}


def as_hinted(value: Any, hint: Any) -> Any:
    """Convert one value; a value that fits no hint is returned unchanged.

    >>> as_hinted([[1, 2], [3, 4]], list[tuple[int, int]])
    [(1, 2), (3, 4)]
    """
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next((member for member in hint if member.value == value), value)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        turned = (as_hinted(value, part) for part in parts)
        return next((one for one in turned if one is not value), value)
    if isinstance(value, list) and (origin is tuple or hint is tuple):
        items = cast("list[Any]", value)
        each = [parts[0]] * len(items) if len(parts) == 2 and parts[1] is Ellipsis else [*parts]
        rest = [None] * (len(items) - len(each))
        return tuple(as_hinted(item, part) for item, part in zip(items, [*each, *rest], strict=False))
    if isinstance(value, list) and origin is list and _differs(hint):
        return [as_hinted(item, parts[0]) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping) and origin is dict and _differs(hint):
        return {key: as_hinted(item, parts[1]) for key, item in cast("Mapping[str, Any]", value).items()}
    return cast("Any", value)


def _differs(hint: Any) -> bool:
    """Whether a value of the hint may have no direct JSON form."""
    if hint is tuple or typing.get_origin(hint) is tuple or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return False
    return any(_differs(part) for part in typing.get_args(hint))
