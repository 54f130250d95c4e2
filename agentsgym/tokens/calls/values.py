"""Parse the values inside a call: strict JSON, and text whose type a schema defines."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentsgym.texts import shown
from agentsgym.types import ToolCall

MAX_DEPTH: Final = 64  # of nested values; the effect of the recursion limit would depend on the caller
MAX_CALLS: Final = 128  # per answer: many malformed calls would take long to parse
ArgumentSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each argument, by tool."""

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"")
_QUOTE = re.compile(r"(?<!\w)['\"]|['\"](?!\w)")  # not an apostrophe


class MalformedCallError(ValueError):
    """A call cannot be parsed; the error's text is the end of a sentence that begins with "the call".

    Attributes:
        position: The index at which parsing stopped, for calls written as Python; otherwise None.
    """

    position: int | None = None


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``start`` or after white space there.

    Duplicate keys, NaN, infinity, unpaired surrogates and too deep nesting are rejected.

    Returns:
        The value, and the index after it.

    >>> read_json('say {"a": [1]} now', 4)
    ({'a': [1]}, 14)
    """
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = f"at character {error.pos - begin} of it"
        raise MalformedCallError(f"is not valid JSON: {error.msg} {place}") from error
    except UnicodeEncodeError as error:
        raise MalformedCallError("is not valid JSON: it contains half of a surrogate pair") from error
    except RecursionError as error:
        raise MalformedCallError(f"is nested more than {MAX_DEPTH} deep") from error
    except MalformedCallError:
        raise
    except ValueError as error:  # an int with more digits than Python accepts
        raise MalformedCallError("is not valid JSON: it contains a number with too many digits") from error
    check_depth(value)
    return value, end


def whole_json(text: str) -> Any:
    """Parse a text that is one JSON value and nothing else."""
    value, end = read_json(text)
    if rest := text[end:].strip():
        raise MalformedCallError(f"is not valid JSON: {rest[:20]!r} follows it")
    return value


def is_finished(text: str) -> bool:
    """Whether what follows a malformed call does not belong to it: its strings and brackets are closed.

    >>> is_finished("{'name': 3}, "), is_finished('{"text": "'), is_finished('{"text": ')
    (True, False, False)
    """
    rest = _STRING.sub("", text)
    return sum(map(rest.count, "{[")) <= sum(map(rest.count, "}]")) and not _QUOTE.search(rest)


def check_depth(value: Any, depth: int = 0) -> None:
    """Raise :class:`MalformedCallError` for a value that is nested more than ``MAX_DEPTH`` deep."""
    if depth > MAX_DEPTH:
        raise MalformedCallError(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        items = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        for item in items:
            check_depth(item, depth + 1)


def tool_call(name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
    """Build a call.

    Raises:
        MalformedCallError: The name or the arguments are of the wrong type.
    """
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("has no name: it must name the tool")
    if not isinstance(arguments, dict):
        kind = _JSON_NAMES.get(type(arguments), "something else")
        raise MalformedCallError(f"of {shown(name, 60)} has arguments that are {kind}: they must be a JSON object")
    known_id = call_id if isinstance(call_id, str) and call_id else None
    return ToolCall(name=name.strip(), arguments=cast("dict[str, Any]", arguments), id=known_id)


def tool_call_from_object(value: Any) -> ToolCall:
    """Build a call from a JSON object with a name and arguments.

    >>> tool_call_from_object({"name": "look", "arguments": {"at": "door"}})
    ToolCall(name='look', arguments={'at': 'door'}, id=None, error=None, repair=None)
    """
    if not isinstance(value, dict):
        raise MalformedCallError('must be a JSON object with "name" and "arguments"')
    fields = dict(cast("dict[str, Any]", value))
    fields.pop("type", None)
    name, call_id = fields.pop("name", None), fields.pop("id", None)
    keys = [key for key in ("arguments", "parameters") if key in fields]
    arguments: Any = fields.pop(keys[0]) if keys else {}
    if isinstance(name, str) and name and fields:
        raise MalformedCallError(
            f'of {shown(name, 60)} has the key {shown(min(fields), 60)} beside "name" and "arguments"'
        )
    return tool_call(name, arguments, call_id)


def malformed_call(error: MalformedCallError, name: str = "") -> ToolCall:
    """Build a call that carries an error message."""
    return ToolCall(name=name, error=f"the call {error}")


def argument_schemas(tools: Sequence[Mapping[str, Any]]) -> ArgumentSchemas:
    """Return the schemas of each tool's arguments."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools}


def typed_arguments(name: str, pairs: Sequence[tuple[str, str]], schemas: ArgumentSchemas) -> dict[str, Any]:
    """Convert arguments that a template writes as bare text to the types of their schemas.

    Args:
        name: The tool.
        pairs: Its arguments as text, in order.
        schemas: The JSON schemas of all tools' arguments.

    >>> typed_arguments("f", [("n", "3"), ("s", "3")], {"f": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    {'n': 3, 's': '3'}
    """
    known = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if key in arguments:
            raise MalformedCallError(f"of {shown(name, 60)} gives {shown(key, 60)} twice")
        arguments[key] = _typed(text, known.get(key, {}))
    return arguments


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    allowed_types = _allowed(schema)
    if allowed_types == {"string"}:
        return text
    written = text.strip()
    try:
        value = WORDS[written] if written in WORDS else whole_json(text)
    except MalformedCallError as error:
        if not allowed_types or "string" in allowed_types or written[:1] not in {"[", "{"}:
            return text
        try:  # a list or a dict as a Python literal
            return literal(written, error)
        except MalformedCallError:
            return text
    if not allowed_types or not allowed_types.isdisjoint(_JSON_KINDS[type(value)]) or "string" not in allowed_types:
        return value
    return text


def _allowed(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty for all."""
    given: Any = schema.get("type", [])
    allowed: set[str] = {given} if isinstance(given, str) else {*given}
    if "enum" in schema and not allowed:
        allowed = {kind for choice in schema["enum"] for kind in _JSON_KINDS.get(type(choice), ())}
    for option in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        allowed |= _allowed(option)
    return allowed | {"null"} if schema.get("nullable") and allowed else allowed


def literal(text: str, error: MalformedCallError) -> Any:
    """Parse a Python literal that is equivalent to a JSON value.

    Args:
        text: The literal.
        error: The error to raise if the text is not such a literal.
    """
    if _BAD_ESCAPE.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        raise error
    try:
        return whole_json(json.dumps(ast.literal_eval(text)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise error from None


def gemma_arguments(text: str) -> Any:
    r"""Parse arguments in the format of Gemma 4: keys without quotes, strings between ``<|"|>``.

    >>> gemma_arguments('{city:<|"|>Paris<|"|>,days:3}')
    {'city': 'Paris', 'days': 3}
    """
    parts = text.split('<|"|>')
    if len(parts) % 2 == 0:
        raise MalformedCallError('has a string that is not closed by <|"|>')
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = json.dumps(part)
        else:
            keys = _BARE_KEY.sub(r'"\1":', part)
            parts[index] = _BARE_WORD.sub(lambda match: json.dumps(WORDS[match[0]]), keys)
    return whole_json("".join(parts))


def skip_space(text: str, start: int) -> int:
    """Return the index after the white space at ``start``."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise MalformedCallError(f"gives {shown(twice, 60)} twice")
    return fields


def _refused(constant: str) -> Any:
    raise MalformedCallError(f"is not valid JSON: {constant} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refused(digits[:20])


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
WORDS: Final[Mapping[str, Any]] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_JSON_NAMES: Final[Mapping[Any, str]] = {
    str: "a string", list: "a list", int: "a number", float: "a number", bool: "true or false", type(None): "null",
}  # fmt: skip
_JSON_KINDS: Final[Mapping[Any, tuple[str, ...]]] = {
    str: ("string",), list: ("array",), dict: ("object",), int: ("integer", "number"), float: ("number",),
    bool: ("boolean",), type(None): ("null",),
}  # fmt: skip
_BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\n'\"\\abfnrtv0-7xuUN]")
_BARE_KEY = re.compile(r"(?<![\w\".-])([^\W\d][\w.-]*+)\s*:")
_BARE_WORD = re.compile(r"\b(?:None|True|False)\b")
