"""Check the arguments of a tool call against the JSON schema of its tool."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from agentsgym.errors import did_you_mean
from agentsgym.texts import shown
from agentsgym.types import ToolCall

_Schema = Mapping[str, Any]


def check_call(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe to the agent what is wrong with a call; None for a valid call.

    Args:
        call: The agent's call.
        schemas: The environment's ``tool_schemas``.

    >>> add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    >>> schema = {"type": "function", "function": add}
    >>> check_call(ToolCall(name="add", arguments={"a": "3"}), [schema])
    "the argument 'a' of 'add' must be an integer, got '3'"
    >>> check_call(ToolCall(name="ad"), [schema])
    "there is no tool 'ad'; did you mean 'add'?"
    >>> check_call(ToolCall(name="add", arguments={"a": 3}), [schema]) is None
    True
    """
    if call.error is not None:
        return call.error
    parameters = {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
    if call.name not in parameters:
        return f"there is no tool {shown(call.name)}{did_you_mean(call.name, parameters)}"
    try:
        return next(
            _object_errors(call.arguments, {"additionalProperties": False, **parameters[call.name]}, call.name), None
        )
    except RecursionError:
        return f"the arguments of {shown(call.name)} are nested too deeply"


def with_integers(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> ToolCall:
    """Convert valid floats, such as 1.0, to ints where the schema of a valid call defines an integer.

    >>> add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    >>> with_integers(ToolCall(name="add", arguments={"a": 1.0}), [{"type": "function", "function": add}]).arguments
    {'a': 1}
    """
    schema = next(schema["function"] for schema in schemas if schema["function"]["name"] == call.name)
    return replace(call, arguments=_as_integers(call.arguments, schema.get("parameters", {})))


def _as_integers(value: Any, schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return value
    known = cast("_Schema", schema)
    if isinstance(value, float) and known.get("type") == "integer":
        return int(value)
    if isinstance(value, list):
        return [_as_integers(item, known.get("items")) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        own: _Schema = known.get("properties") or {}
        return {name: _as_integers(item, own.get(name)) for name, item in cast("dict[str, Any]", value).items()}
    return value


def _object_errors(value: Mapping[str, Any], schema: _Schema, tool: str, path: str = "") -> Iterator[str]:
    """Yield what is wrong with an object: missing properties first, then unexpected properties and invalid values."""
    properties: _Schema = schema.get("properties") or {}
    rest: Any = schema.get("additionalProperties", True)
    required: Any = schema.get("required")
    for name in cast("list[Any]", required) if isinstance(required, list) else ():
        if name not in value:
            yield f"the argument {shown(path + name)} of {shown(tool)} is missing"
    for name, item in value.items():
        if name in properties:
            yield from _value_errors(item, properties[name], tool, path + name)
        elif rest is False:
            known = did_you_mean(name, properties) if properties else "; it takes none"
            yield f"{shown(tool)} has no argument {shown(path + name)}{known}"
        elif isinstance(rest, Mapping):
            yield from _value_errors(item, cast("_Schema", rest), tool, path + name)


def _value_errors(value: Any, schema: _Schema, tool: str, path: str) -> Iterator[str]:
    expected = _expected(value, schema)
    if expected is not None:
        yield f"the argument {shown(path)} of {shown(tool)} must be {expected}, got {shown(value)}"
    elif isinstance(value, Mapping):
        yield from _object_errors(cast("Mapping[str, Any]", value), schema, tool, f"{path}.")
    elif isinstance(value, list):
        first: Sequence[Any] = schema.get("prefixItems") or ()  # for tuples: one schema per item
        for index, item in enumerate(cast("list[Any]", value)):
            own = first[index] if index < len(first) else schema.get("items")
            if isinstance(own, Mapping):
                yield from _value_errors(item, cast("_Schema", own), tool, f"{path}[{index}]")


def _expected(value: Any, schema: _Schema) -> str | None:
    """Describe the expected kind of an invalid value, as the end of a sentence; None for a valid one."""
    if value is None and schema.get("nullable"):
        return None
    if "enum" in schema or "const" in schema:
        choices: list[Any] = schema.get("enum") or [schema.get("const")]
        if any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in choices):
            return None
        return f"one of {', '.join(shown(one, 40) for one in choices[:20])}{', …' if len(choices) > 20 else ''}"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            fits = any(next(_value_errors(value, option, "", ""), None) is None for option in schema[key])
            return None if fits else f"one of the {len(schema[key])} forms that the tool's description gives"
    kinds: Any = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    known = [kind for kind in kinds if kind in _KINDS]
    if known and not any(_KINDS[kind][0](value) for kind in known):
        return " or ".join(_KINDS[kind][1] for kind in known)
    return _out_of_bounds(value, schema)


def _out_of_bounds(value: Any, schema: _Schema) -> str | None:
    size = len(cast("Sequence[Any]", value)) if isinstance(value, str | list) else value
    if isinstance(value, list):
        if schema.get("items") is False:  # no items after the first ones
            schema = {"maxItems": len(schema.get("prefixItems") or ()), **schema}
        if "maxItems" in schema and schema.get("minItems") == schema["maxItems"] != size:
            return f"a list of {schema['maxItems']} items"
    for key, is_within, expected in _BOUNDS.get(type(cast("object", value)), ()):
        if key in schema and not is_within(size, schema[key]):
            return expected.format(schema[key])
    return None


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


_KINDS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "string": (lambda value: isinstance(value, str), "a string"),
    "integer": (_is_integer, "an integer"),
    "number": (lambda value: _is_integer(value) or (isinstance(value, float) and math.isfinite(value)), "a number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "null": (lambda value: value is None, "null"),
    "array": (lambda value: isinstance(value, list), "a list"),
    "object": (lambda value: isinstance(value, Mapping), "an object"),
}

_Bound = tuple[str, Callable[[Any, Any], bool], str]
_OF_NUMBERS: Final[tuple[_Bound, ...]] = (
    ("minimum", lambda size, bound: size >= bound, "at least {}"),
    ("maximum", lambda size, bound: size <= bound, "at most {}"),
    ("exclusiveMinimum", lambda size, bound: size > bound, "above {}"),
    ("exclusiveMaximum", lambda size, bound: size < bound, "below {}"),
)
_BOUNDS: Final[dict[type, tuple[_Bound, ...]]] = {
    int: _OF_NUMBERS,
    float: _OF_NUMBERS,
    str: (
        ("minLength", lambda size, bound: size >= bound, "a string of at least {} characters"),
        ("maxLength", lambda size, bound: size <= bound, "a string of at most {} characters"),
    ),
    list: (
        ("minItems", lambda size, bound: size >= bound, "a list of at least {} items"),
        ("maxItems", lambda size, bound: size <= bound, "a list of at most {} items"),
    ),
}
BOUNDS: Final = tuple(sorted({key for bounds in _BOUNDS.values() for key, _, _ in bounds}))
"""The keywords that bound a number or a length."""
