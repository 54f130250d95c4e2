"""Read the JSON body of a request part by part; each error names its part, such as ``messages[2].content``."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple, cast

from agentsgym.envs.AgentProgram.calls import CallError
from agentsgym.fields import Check, is_dict, is_str, one_of
from agentsgym.texts import shown, visible
from agentsgym.tokens.calls.values import MAX_DEPTH

_MAX_BITS: Final = 1023  # of an int; larger ones are not finite as a float
_LARGEST: Final = 1e300  # of numbers that need no closer look
_MAX_KEYS: Final = 8  # in the name of a part
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Part(NamedTuple):  # several for each message of each call, and much cheaper to make than a frozen dataclass
    """One part of a request's body.

    Attributes:
        name: Its place in the body, such as ``messages[2].content``; empty for the whole body.
        value: The JSON value; None if it is missing or null, which no API distinguishes.
    """

    name: str
    value: Any

    def wrong(self, expected: str) -> CallError:
        """Return the error of a value that is missing or not ``expected``."""
        name = self.name or "the body"
        if self.value is None:
            return CallError(f"{name} is missing: it must be {expected}", param=self.name or None)
        return CallError(f"{name} must be {expected}, got {shown(self.value)}", param=self.name or None)

    def required(self, valid: Check, expected: str) -> Any:
        """Return the value; raise :class:`CallError` if it is missing or not valid."""
        if self.value is None or not valid(self.value):
            raise self.wrong(expected)
        return self.value

    def optional(self, valid: Check, expected: str) -> Any:
        """Return the value, or None if it is missing; raise :class:`CallError` if it is not valid."""
        return None if self.value is None else self.required(valid, expected)

    def at(self, key: str) -> Part:
        """Return a field of an object; a missing object has none."""
        fields: Any = self.value if type(cast("object", self.value)) is dict else self.optional(is_dict, "an object")
        value = None if fields is None else fields.get(key)
        return Part(f"{self.name}.{key}" if self.name else key, value)

    def items(self, expected: str = "a list") -> list[Part]:
        """Return the items of a list; a missing list has none."""
        values = self.optional(lambda value: isinstance(value, list), expected) or ()
        return [Part(f"{self.name}[{index}]", value) for index, value in enumerate(values)]

    def choice(self, names: Collection[str]) -> str:
        """Return a string that must be one of the names."""
        if type(self.value) is str and self.value in names:
            return self.value
        return self.required(one_of(*names), f"one of {', '.join(map(repr, names))}")

    def kind(self) -> str:
        """Return the ``type`` of an object; empty if it has none."""
        return self.at("type").optional(is_str, "a string") or ""


def whole_body(body: Any) -> Part:
    """Return the body as a part after a check of all its values.

    Raises:
        CallError: The body is not an object; or it contains half of a surrogate pair, a number that is not finite or
            too large, or values that are nested too deeply, which JSON may contain but no tokenizer accepts.
    """
    *keys, problem = ("",) if _is_surely_usable(body) else _first_problem(body, 0) or ("",)
    if problem:
        steps = (f"[{key}]" if isinstance(key, int) else f".{visible(key)[:60]}" for key in keys[:_MAX_KEYS])
        name = "".join(steps).removeprefix(".")
        raise CallError(f"{name or 'the body'} {problem}", param=name or None)
    whole = Part(name="", value=body)
    whole.required(is_dict, "an object")
    return whole


def _is_surely_usable(body: Any) -> bool:
    """Whether :func:`_first_problem` finds none for sure; on the path of every call, and several times faster."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            kind = type(cast("object", value))
            if kind is list:
                below += value
            elif kind is dict:
                below += value
                below += value.values()
            elif kind is str:
                if not value.isascii() and _SURROGATE.search(value):
                    return False
            elif value is not None and not -_LARGEST <= value <= _LARGEST:  # or NaN
                return False
        level = below
    return not level


def _first_problem(value: Any, depth: int) -> tuple[Any, ...]:
    """Return the keys that lead to the first unusable value and, last, what is wrong with it; empty for none."""
    if isinstance(value, str):
        bad = not value.isascii() and _SURROGATE.search(value)
        return ("contains half of a surrogate pair, which is not valid Unicode",) if bad else ()
    if isinstance(value, int | float):
        bad = value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value)
        return ("contains a number that is not finite or has too many digits",) if bad else ()
    if not isinstance(value, dict | list):
        return ()
    if depth >= MAX_DEPTH:
        return (f"is nested more than {MAX_DEPTH} deep",)
    inner: Iterable[tuple[Any, Any]] = enumerate(cast("list[Any]", value))
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        inner = (*fields.items(), *((key, key) for key in fields))
    for key, item in inner:
        if found := _first_problem(item, depth + 1):
            return (key, *found)
    return ()
