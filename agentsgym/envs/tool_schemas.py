"""Create the JSON schemas of tools, in a form that every chat template renders, and check calls against them."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_str, is_strings, require
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of, shown
from agentsgym.types import ToolCall
from agentsgym.versions import json_schema

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
    return isinstance(value, int) and not isinstance(value, bool)


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

_NAME = re.compile(r"[A-Za-z0-9_./-]{1,128}")
_UNNAMED_KINDS = {
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values",
    inspect.Parameter.VAR_KEYWORD: "takes any names",
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only",
}


def schemas_of(
    tools: Sequence[Callable[..., Any] | Mapping[str, Any]] | None, owner: str
) -> tuple[dict[str, Any], ...]:
    """Create the full JSON schema of each tool: ``{"type": "function", "function": {name, description, parameters}}``.

    The schema of a typed function is derived from its name, its docstring (Google style, with a line in ``Args:`` for
    each argument) and its type hints, without the return type. A given schema may be only the inner part, and
    descriptions may be missing. ``$ref`` is resolved, and a choice between a type and null becomes ``nullable``, since
    some chat templates drop both. A recursive ``$ref`` becomes an object of any form.

    Args:
        tools: Typed functions, or schemas; None for no tools.
        owner: The name of the tools' owner in errors.

    Raises:
        ConfigError: A function has no valid schema, a schema is not valid, or two tools have the same name.
    """
    given: Any = () if tools is None else tools
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"the tools of {owner} must be a list of functions and JSON schemas, got {_shown(given)}")
    schemas: list[dict[str, Any]] = []
    for tool in cast("Sequence[Any]", given):
        if isinstance(tool, Mapping):
            schemas.append(_completed(cast("Mapping[str, Any]", tool), f"the tool {_shown(tool)} of {owner}"))
        elif callable(tool):
            schemas.append(_of_function(tool, owner))
        else:
            raise ConfigError(f"a tool of {owner} must be a typed function or a JSON schema, got {shown(tool)}")
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two tools of {owner} are called {twice[0]!r}: rename one of them")
    return tuple(schemas)


def _shown(value: Any) -> str:
    return shown(value, 100)


def _of_function(tool: Callable[..., Any], owner: str) -> dict[str, Any]:
    name = str(getattr(tool, "__name__", type(tool).__name__))
    place = f"no JSON schema can be created for {owner}'s tool {name!r}"
    if problem := _problem(tool):
        raise ConfigError(f"{place}: {problem}")
    try:
        schema = json_schema(tool)
    except BaseException as error:
        if is_interruption(error):
            raise
        text, parameters = sentence_of(error), inspect.signature(tool).parameters
        for argument, parameter in parameters.items():
            if repr(parameter.annotation) in text:
                text = (
                    f"the type of its argument {argument!r} has no JSON form, {parameter.annotation!r}: use str, int, "
                    "float, bool, Literal, an Enum (transformers 5.23 or newer), or a list, dict or Union of these, or "
                    "pass the complete schema as a dict"
                )
                break
        raise ConfigError(f"{place}: {text}") from error
    schema["function"].pop("return", None)  # it would cost prompt tokens, and servers reject the key
    return _completed(_with_lengths(schema), f"the schema of {owner}'s tool {name!r}")


def _with_lengths(part: Any) -> Any:
    """Add the length of lists that stand for tuples, such as ``tuple[int, int]``, to a schema made from type hints."""
    if isinstance(part, list):
        return [_with_lengths(item) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    schema = {key: _with_lengths(value) for key, value in cast("dict[str, Any]", part).items()}
    items = schema.get("prefixItems")
    if schema.get("type") != "array" or not isinstance(items, list):
        return schema
    size = len(cast("list[Any]", items))
    return {"minItems": size, "maxItems": size, **schema}


def _problem(tool: Callable[..., Any]) -> str | None:
    """Describe the first problem that keeps a function from having a schema; None if there is none."""
    for name, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in _UNNAMED_KINDS:
            return f"its argument {name!r} {_UNNAMED_KINDS[parameter.kind]}: calls pass arguments by name"
        if parameter.annotation is inspect.Parameter.empty:
            return f"its argument {name!r} has no type hint: write for example '{name}: str'"
    doc = inspect.getdoc(tool)
    if not doc or not getattr(tool, "__doc__", None):
        return "it has no docstring: write what it does, and under 'Args:' a line for each argument"
    for name in inspect.signature(tool).parameters:
        if not re.search(rf"^[ \t]*Args:\n(?s:.*?)^[ \t]+{re.escape(name)}:", doc, re.MULTILINE):
            return f"its docstring does not describe {name!r}: write under 'Args:' a line '{name}: what it is'"
    return None


def _completed(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Check a schema, and fill in optional parts."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must contain only JSON values: {sentence_of(error)}") from error
    function = copied.get("function", copied)
    if copied.get("type", "function") != "function" or not isinstance(function, dict):
        raise ConfigError(f'{name} must be {{"type": "function", "function": {{…}}}} or the value of its "function"')
    fields = cast("dict[str, Any]", function)
    fields = {key: value for key, value in fields.items() if key != "type"} if fields is copied else fields
    tool, description = fields.get("name"), fields.get("description")
    if not isinstance(tool, str) or not _NAME.fullmatch(tool):
        raise ConfigError(f"{name} must have a name of letters, digits, '_', '-', '.' and '/', got {shown(tool)}")
    if not isinstance(description, str | None):
        raise ConfigError(f"{name}: its description must be a string, got {shown(description)}")
    rest = {key: value for key, value in fields.items() if key not in {"name", "description", "parameters"}}
    parameters = _parameters(fields.get("parameters"), name)
    function = {"name": tool, "description": description or "", "parameters": parameters, **rest}
    return {"type": "function", "function": function}


def _parameters(given: Any, name: str) -> dict[str, Any]:
    parameters = cast("dict[str, Any]", {} if given is None else given)
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f'{name}: its parameters must be a JSON schema of the type "object", got {shown(given)}')
    definitions: dict[str, Any] = {}
    for key in ("definitions", "$defs"):
        part = parameters.get(key, {})
        require(f"{name}: its {key}", part, _are_schemas, "a dict of JSON schemas")
        definitions |= part
    bare = {key: value for key, value in parameters.items() if key not in {"$defs", "definitions", "$schema"}}
    plain: dict[str, Any] = {"type": "object", "properties": {}, **_inlined(bare, definitions, name)}
    properties = cast("dict[str, dict[str, Any]]", plain["properties"])
    require(f"{name}: its properties", properties, _are_schemas, "a dict of JSON schemas")
    required: Any = plain.get("required", [])
    if not isinstance(required, list) or not {*map(str, cast("list[Any]", required))} <= {*properties}:
        raise ConfigError(f"{name}: required must be a list of its properties, got {shown(cast('object', required))}")
    _check_keywords(plain, name)
    for one in properties.values():
        one.setdefault("description", "")
    return plain


def _are_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) for one in cast("dict[str, Any]", value).values())


def _is_list_of_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in cast("list[Any]", value))


# The keywords by which calls are checked. In old drafts, "required" and "exclusiveMinimum" may be bools.
_KEYWORDS: dict[str, tuple[Check, str]] = {
    "type": (lambda value: is_str(value) or is_strings(value), "a string or a list of strings"),
    "properties": (_are_schemas, "a dict of JSON schemas"),
    "required": (lambda value: isinstance(value, bool) or is_strings(value), "a list of strings"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    **dict.fromkeys(
        ("items", "additionalProperties"),
        (lambda value: isinstance(value, dict | bool) or _is_list_of_schemas(value), "a JSON schema, true or false"),
    ),
    **dict.fromkeys(("anyOf", "oneOf", "prefixItems"), (_is_list_of_schemas, "a list of JSON schemas")),
    **dict.fromkeys(BOUNDS, (lambda value: isinstance(value, int | float), "a number")),
}


def _check_keywords(schema: Mapping[str, Any], name: str) -> None:
    """Check the types of a schema's keywords, on which the checks of calls rely, and those of the schemas inside it."""
    for key, (valid, expected) in _KEYWORDS.items():
        if key in schema:
            require(f"{name}: its {key}", schema[key], valid, expected)
    inner = [*schema.get("properties", {}).values(), *(schema.get(key) for key in ("items", "additionalProperties"))]
    for part in chain(inner, *(schema.get(key, ()) for key in ("anyOf", "oneOf", "prefixItems"))):
        if isinstance(part, dict):
            _check_keywords(cast("dict[str, Any]", part), name)


def _inlined(part: Any, definitions: Mapping[str, Any], name: str, open_refs: tuple[str, ...] = ()) -> Any:
    """Resolve every ``$ref``, and replace null by ``nullable``, in a schema or a part of one."""
    if isinstance(part, list):
        return [_inlined(item, definitions, name, open_refs) for item in cast("list[Any]", part)]
    if not isinstance(part, dict):
        return part
    schema = cast("dict[str, Any]", part)
    if not isinstance(schema.get("$ref"), str):
        return _nullable({key: _inlined(value, definitions, name, open_refs) for key, value in schema.items()})
    target = str(schema["$ref"]).rpartition("/")[2]
    if target not in definitions:
        raise ConfigError(f"{name}: its $ref {shown(schema['$ref'])} is not among its $defs, {sorted(definitions)}")
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    if target in open_refs:
        return {"type": "object", **beside}
    return _inlined({**definitions[target], **beside}, definitions, name, (*open_refs, target))


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a choice between null and another type by ``nullable``."""
    kinds, options = schema.get("type"), schema.get("anyOf")
    if isinstance(kinds, list) and "null" in kinds:
        rest = [kind for kind in cast("list[Any]", kinds) if kind != "null"]
        return {**schema, "type": rest[0] if len(rest) == 1 else rest, "nullable": True}
    if not isinstance(options, list) or {"type": "null"} not in options:
        return schema
    rest = [option for option in cast("list[Any]", options) if option != {"type": "null"}]
    beside = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**(rest[0] if len(rest) == 1 else {"anyOf": rest}), **beside, "nullable": True}
