"""Read the values inside a call: strict JSON, text that a schema gives a type, and calls written as Python."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentsgym.texts import shown
from agentsgym.types import ToolCall

MAX_DEPTH: Final = 64  # of values in values; the recursion limit would depend on who calls
MAX_CALLS: Final = 128  # of an answer: what is malformed again and again would take long to read
Kinds = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each argument, by tool."""

_SPACE = re.compile(r"\s*")


class MalformedCallError(ValueError):
    """A call cannot be read; its text is the end of a sentence that begins with "the call".

    Attributes:
        place: Where reading stopped, in calls written as Python; None elsewhere.
    """

    place: int | None = None


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Read the JSON value that begins at ``start`` or behind white space there.

    Keys that come twice, NaN, infinity and halves of surrogate pairs are refused, as is what is nested too deeply.

    Returns:
        The value, and the index behind it.

    Raises:
        MalformedCallError: There is none.

    >>> read_json('say {"a": [1]} now', 4)
    ({'a': [1]}, 14)
    """
    begin = _skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = f"at character {error.pos - begin} of it"
        raise MalformedCallError(f"is no valid JSON: {error.msg} {place}") from error
    except UnicodeEncodeError as error:
        raise MalformedCallError("is no valid JSON: it holds half of a surrogate pair") from error
    except RecursionError as error:
        raise MalformedCallError(f"is nested more than {MAX_DEPTH} deep") from error
    except MalformedCallError:
        raise
    except ValueError as error:  # an int of more digits than Python reads
        raise MalformedCallError("is no valid JSON: it holds a number of too many digits") from error
    check_depth(value)
    return value, end


def whole_json(text: str) -> Any:
    """Read a text that is one JSON value and nothing else.

    Raises:
        MalformedCallError: It is none.
    """
    value, end = read_json(text)
    if rest := text[end:].strip():
        raise MalformedCallError(f"is no valid JSON: {rest[:20]!r} follows it")
    return value


def check_depth(value: Any, depth: int = 0) -> None:
    """Raise :class:`MalformedCallError` for a value that is nested more than ``MAX_DEPTH`` deep."""
    if depth > MAX_DEPTH:
        raise MalformedCallError(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        items = cast("dict[str, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        for item in items:
            check_depth(item, depth + 1)


def call_of(name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
    """Make a call of what was read.

    Raises:
        MalformedCallError: The name or the arguments are of a wrong type.
    """
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("has no name: it must name the tool")
    if not isinstance(arguments, dict):
        kind = _JSON_NAMES.get(type(arguments), "something else")
        raise MalformedCallError(f"of {shown(name, 60)} has arguments that are {kind}: they must be a JSON object")
    known_id = call_id if isinstance(call_id, str) and call_id else None
    return ToolCall(name=name.strip(), arguments=cast("dict[str, Any]", arguments), id=known_id)


def call_of_object(value: Any) -> ToolCall:
    """Make a call of a JSON object with a name and arguments.

    >>> call_of_object({"name": "look", "arguments": {"at": "door"}})
    ToolCall(name='look', arguments={'at': 'door'}, id=None, error=None)

    Raises:
        MalformedCallError: It is no such object.
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
    return call_of(name, arguments, call_id)


def failed_call(error: MalformedCallError, name: str = "") -> ToolCall:
    """Make the call that could not be read, with what was wrong as a sentence."""
    return ToolCall(name=name, error=f"the call {error}")


def kinds_of(tools: Sequence[Mapping[str, Any]]) -> Kinds:
    """Look up the schema of each tool's arguments."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools}


def typed_arguments(name: str, pairs: Sequence[tuple[str, str]], kinds: Kinds) -> dict[str, Any]:
    """Give the arguments that a template writes as bare text the types of their schemas.

    Args:
        name: The tool.
        pairs: Its arguments as text, in order.
        kinds: The schemas.

    Raises:
        MalformedCallError: An argument comes twice.

    >>> typed_arguments("f", [("n", "3"), ("s", "3")], {"f": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    {'n': 3, 's': '3'}
    """
    known = kinds.get(name, {})
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if key in arguments:
            raise MalformedCallError(f"of {shown(name, 60)} gives {shown(key, 60)} twice")
        arguments[key] = _typed(text, known.get(key, {}))
    return arguments


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    kinds = _allowed(schema)
    if kinds == {"string"}:
        return text
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else whole_json(text)
    except MalformedCallError as error:
        return text if not kinds or "string" in kinds else _as_python(text, error)
    if not kinds or not kinds.isdisjoint(_JSON_KINDS[type(value)]) or "string" not in kinds:
        return value
    return text


def _as_python(text: str, error: MalformedCallError) -> Any:
    """Read a list or a dict as Python prints it; the text if it is none."""
    try:
        return _literal(text.strip(), error) if text.strip()[:1] in {"[", "{"} else text
    except MalformedCallError:
        return text


def _allowed(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty for all."""
    kinds: Any = schema.get("type", [])
    allowed: set[str] = {kinds} if isinstance(kinds, str) else {*kinds}
    if "enum" in schema and not allowed:
        allowed = {kind for choice in schema["enum"] for kind in _JSON_KINDS.get(type(choice), ())}
    for option in [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        allowed |= _allowed(option)
    return allowed | {"null"} if schema.get("nullable") and allowed else allowed


def python_calls(text: str) -> list[ToolCall]:
    """Read calls written as a Python list, ``[look(at='door', times=2), wait()]``, each by itself.

    A string is taken as it stands between its quotes, for templates escape nothing in it. One that would swallow the
    call behind it is malformed, and reading goes on at that call.

    >>> [(call.name, call.arguments) for call in python_calls("[look(at='Bob's', times=2), wait()]")]
    [('look', {'at': "Bob's", 'times': 2}), ('wait', {})]
    """
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("[") and inner.endswith("]") else inner
    calls: list[ToolCall] = []
    place = _skip_space(inner, 0)
    while place < len(inner) and len(calls) <= MAX_CALLS:
        name = _CALL_HEAD.match(inner, place)
        try:
            arguments, place = _python_arguments(inner, place if name is None else name.end(), is_call=name is not None)
            calls.append(call_of(name[1] if name else "", arguments))
            separator = _BETWEEN_CALLS.match(inner, place)
            place = separator.end() if separator else len(inner)
        except MalformedCallError as error:
            calls.append(failed_call(error, name[1] if name else ""))
            later = _LATER_CALL.search(inner, place if error.place is None else error.place)
            place = len(inner) if later is None else later.end()
    return calls


def _python_arguments(text: str, start: int, *, is_call: bool) -> tuple[dict[str, Any], int]:
    """Read arguments up to the bracket that closes them; returns them and the index behind it."""
    if not is_call:
        raise MalformedCallError("must be written as name(argument=value)")
    arguments: dict[str, Any] = {}
    place = _skip_space(text, start)
    while not text.startswith(")", place):
        try:
            place = _python_argument(text, place, arguments)
        except MalformedCallError as error:
            error.place = len(text[:place].rstrip(", \t\n"))  # what follows the last comma may be the next call
            raise
    return arguments, place + 1


def _python_argument(text: str, start: int, arguments: dict[str, Any]) -> int:
    """Read one argument into ``arguments``; returns the index behind it and its comma."""
    key = _KEY.match(text, start)
    if key is None:
        raise MalformedCallError("gives an argument without its name: write name(argument=value)")
    if key[1] in arguments:
        raise MalformedCallError(f"gives {key[1]!r} twice")
    arguments[key[1]], place = _python_value(text, key.end())
    separator = _SEPARATOR.match(text, place)
    if separator is None:
        raise MalformedCallError(f"has no ',' or ')' behind its argument {key[1]!r}")
    return separator.end()


def _python_value(text: str, start: int) -> tuple[Any, int]:
    first = text[start : start + 1]
    if first in {"'", '"'}:
        end = re.compile(first + _BEHIND_STRING).search(text, start + 1)
        if end is None:
            raise MalformedCallError("has a string that is not closed")
        value = text[start + 1 : end.start()]
        if _swallows_a_call(value, first):
            raise MalformedCallError("has a string that is not closed in front of the next call")
        return value, end.start() + 1
    if first in {"[", "{"}:
        return _python_container(text, start)
    word = _WORD.match(text, start)
    written = word[0].strip() if word else ""
    return (_WORDS[written] if written in _WORDS else whole_json(written)), start + len(word[0] if word else "")


def _swallows_a_call(value: str, quote: str) -> bool:
    """Whether what stands between two quotes begins another call, with a string of its own that the second closes."""
    head = _LATER_CALL.search(value)
    return head is not None and re.compile(r"\w\s*=\s*" + quote).search(value, head.end()) is not None


def _python_container(text: str, start: int) -> tuple[Any, int]:
    try:
        return read_json(text, start)
    except MalformedCallError as error:
        for end in _CLOSERS.finditer(text, start):  # a list is printed as Python prints it
            written = text[start : end.end()]
            if written.count(written[0]) == written.count("]" if written[0] == "[" else "}"):
                return _literal(written, error), end.end()
        raise


def _literal(text: str, error: MalformedCallError) -> Any:
    """Read a Python literal that is a JSON value, too."""
    if _BAD_ESCAPE.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        raise error
    try:
        return whole_json(json.dumps(ast.literal_eval(text)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise error from None


def gemma_arguments(text: str) -> Any:
    r"""Read arguments written as Gemma 4 does: keys without quotes, strings between ``<|"|>``.

    Raises:
        MalformedCallError: They cannot be read.

    >>> gemma_arguments('{city:<|"|>Paris<|"|>,days:3}')
    {'city': 'Paris', 'days': 3}
    """
    parts = text.split('<|"|>')
    if len(parts) % 2 == 0:
        raise MalformedCallError('has a string that is not closed by <|"|>')
    written = [_quoted(part) if index % 2 == 0 else json.dumps(part) for index, part in enumerate(parts)]
    return whole_json("".join(written))


def _quoted(text: str) -> str:
    keys = _BARE_KEY.sub(r'"\1":', text)
    return _BARE_WORD.sub(lambda match: json.dumps(_WORDS[match[0]]), keys)


def _skip_space(text: str, start: int) -> int:
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
    raise MalformedCallError(f"is no valid JSON: {constant} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refused(digits[:20])


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
_WORDS: Final[Mapping[str, Any]] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_JSON_NAMES: Final[Mapping[Any, str]] = {
    str: "a string", list: "a list", int: "a number", float: "a number", bool: "true or false", type(None): "null",
}  # fmt: skip
_JSON_KINDS: Final[Mapping[Any, tuple[str, ...]]] = {
    str: ("string",), list: ("array",), dict: ("object",), int: ("integer", "number"), float: ("number",),
    bool: ("boolean",), type(None): ("null",),
}  # fmt: skip
_CALL_HEAD = re.compile(r"\s*([\w./-]+)\(")
_LATER_CALL = re.compile(r",\s*(?=[\w./-]+\(\s*(?:\)|\w+\s*=))")
_BETWEEN_CALLS = re.compile(r"\s*,?\s*")
_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_SEPARATOR = re.compile(r"\s*,\s*|\s*(?=\))")
_BEHIND_STRING = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w./-]+\(|\]?\s*$)))"
_WORD = re.compile(r"[^,)]*")
_CLOSERS = re.compile(r"[\]}]")
_BAD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\n'\"\\abfnrtv0-7xuUN]")
_BARE_KEY = re.compile(r"(?<![\w\"])([^\W\d][\w.-]*)\s*:")
_BARE_WORD = re.compile(r"\b(?:None|True|False)\b")
