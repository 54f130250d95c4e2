"""Create the JSON schemas of tools, in a form that every chat template renders."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from agentsgym.errors import ConfigError
from agentsgym.fields import Check, is_str, is_strings, or_none, require
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of, shown
from agentsgym.tokens.calls.schemas import BOUNDS
from agentsgym.tokens.calls.schemas import check_call as check_call  # noqa: PLC0414  # its documented place
from agentsgym.versions import json_schema

_Schema = Mapping[str, Any]

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
    require(f"{name}: its description", description, or_none(is_str), "a string")
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
