"""Parse a call that a model meant but did not write in its format, and recognize one that cannot be parsed.

A repair never executes a quotation: the call begins a line, nothing but white space and closing tags follows it, a code
fence around it contains nothing else, its tool exists, and its arguments match the tool's schema. Each function takes a
time that is linear in the length of the answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from agentsgym.tokens.calls.families import read_inline, read_xml
from agentsgym.tokens.calls.forms import Answer, MarkedForm, Read, escaped_string, python_calls
from agentsgym.tokens.calls.schemas import check_call
from agentsgym.tokens.calls.values import (
    MAX_CALLS,
    ArgumentSchemas,
    MalformedCallError,
    argument_schemas,
    malformed_call,
    read_json,
    tool_call_from_object,
    whole_json,
)
from agentsgym.types import ToolCall

OPENING_TAG: Final = "opening_tag"
BARE: Final = "bare"
ARGUMENTS_TEXT: Final = "arguments_text"
TRAILING_COMMA: Final = "trailing_comma"
OPEN_THOUGHT: Final = "open_thought"

_UNEXPECTED: Final = "is not written in the expected form"
_CALL_TAG: Final = r"(?:[a-z]+:)?(?i:tool_?calls?|function_calls?)"

_Tools = Sequence[Mapping[str, Any]]
_FUNCTION = re.compile(r"^[ \t]*(?=<function=([^>\n]*)>)", re.MULTILINE)
_FUNCTIONS = re.compile(r"(?:<function=[^>\n]*>(?:(?!</?function\b).)*+</function>\s*)+", re.DOTALL)
_VALUE = re.compile(
    rf"^[ \t]*(?P<tag><{_CALL_TAG}>\s*)?(?P<fence>```\w*[ \t]*\n\s*)?"
    r"(?=(?:\[\s*)?\{\s*\"(?:name|type|function|arguments|parameters|id)\"|(?P<python>\[[\w./-]+\())",
    re.MULTILINE,
)
_CLOSING_TAGS = re.compile(rf"(?:\s|</{_CALL_TAG}>)*+")
_FENCE = re.compile(r"^[ \t]*```\w*\s*\Z", re.MULTILINE)
_FENCE_LINE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_OPEN_TAG = re.compile(rf"(?:<(?!{_CALL_TAG}>)[a-z][^<>\n]{{0,80}}>|<!--|\"\"\"|''')\Z")
_FENCE_END = re.compile(r"\s*```\s*")
_STRING_OR_COMMA = re.compile(r"(\"(?:[^\"\\]|\\.)*+(?:\"|\Z))|,(?=\s*[}\]])", re.DOTALL)
_NEXT_OBJECT = re.compile(r"[ \t]*[,;]?[ \t]*\n\s*(?=\{)")
_WITH_ARGUMENTS: Final = ("arguments", "parameters")


class _Found(NamedTuple):
    """A call outside the format of its template.

    Attributes:
        before: The text before it.
        calls: The calls, with the kind of their repair.
    """

    before: str
    calls: list[ToolCall]


def with_repairs(answer: Answer, form: object, tools: _Tools, *, is_strict: bool = False) -> Answer:
    """Return an answer with the calls for which it needs a repair, or with a malformed call if they cannot be parsed.

    Args:
        answer: The complete answer, as its form reads it, without well-formed calls.
        form: The form of its template.
        tools: The JSON schemas of the tools.
        is_strict: Whether a repair is an error.
    """
    if answer.failed and not answer.is_open:
        return _with_repaired_block(answer, form, tools, is_strict=is_strict)
    schemas = argument_schemas(tools)
    if answer.is_open:
        text = answer.open_thought if answer.open_thought is not None else answer.reasoning or ""
        found = _in_thought(text, form, schemas)
    else:
        text = answer.content
        read = read_inline if isinstance(form, MarkedForm) and form.read is read_inline else read_xml
        found = _tagged(text, schemas, read) or _written_plainly(text)
    if found is not None and _are_valid(found.calls, tools):
        if is_strict:
            return dataclasses.replace(answer, calls=(malformed_call(MalformedCallError(_UNEXPECTED)),))
        kept = "reasoning" if answer.is_open else "content"
        return dataclasses.replace(answer, **{kept: found.before.rstrip()}, calls=tuple(found.calls))
    if answer.is_open or answer.calls or not (answer.is_marked or _is_meant(text, found, schemas)):
        return answer
    problem = next((error for call in found.calls if (error := check_call(call, tools))), None) if found else None
    error = MalformedCallError(f"cannot be read: {problem}" if problem else _UNEXPECTED)
    return dataclasses.replace(answer, calls=(malformed_call(error),))


def _with_repaired_block(answer: Answer, form: object, tools: _Tools, *, is_strict: bool) -> Answer:
    """Repair a malformed block of the template's form as a whole; a call that it quotes in its arguments is none."""
    block = answer.failed[-1]
    if len(answer.failed) > 1 or not block or not answer.content.endswith(block) or not isinstance(form, MarkedForm):
        return answer
    body = Answer(content=form.opens.sub("", block, count=1).strip())
    repaired = with_repairs(body, form, tools, is_strict=is_strict)
    if repaired.content or not repaired.calls:
        return answer
    return dataclasses.replace(answer, content=answer.content.removesuffix(block).rstrip(), calls=repaired.calls)


def _are_valid(calls: Sequence[ToolCall], tools: _Tools) -> bool:
    return bool(calls) and all(check_call(call, tools) is None for call in calls)


def _is_meant(text: str, found: _Found | None, schemas: ArgumentSchemas) -> bool:
    """Whether an answer is a call of a known tool, or has a line with the beginning of one that is not complete."""
    if found is not None and any(call.repair == OPENING_TAG or not found.before.strip() for call in found.calls):
        return any(call.name in schemas for call in found.calls)
    end = 0
    for begin in _FUNCTION.finditer(text):
        if begin.start() >= end and begin[1].strip() in schemas:
            functions = _FUNCTIONS.match(text, begin.end())
            if functions is None:
                return True
            end = functions.end()
    return False


def _in_thought(text: str, form: object, schemas: ArgumentSchemas) -> _Found | None:
    """Find a complete call in the template's format at the end of reasoning that was not closed."""
    if not isinstance(form, MarkedForm):
        return None
    for begin in form.opens.finditer(text):
        before = text[: begin.start()] if form.wraps is None else form.wraps.sub("", text[: begin.start()])
        if before.rpartition("\n")[2].strip() or _is_open_before(before, len(before)):
            continue
        inner = form.answer("", text[begin.start() :], schemas)
        if inner.content.strip() or inner.reasoning is not None:
            return None
        return _Found(before, [dataclasses.replace(call, repair=OPEN_THOUGHT) for call in inner.calls])
    return None


def _tagged(text: str, schemas: ArgumentSchemas, read: Read) -> _Found | None:
    """Find calls whose opening tag is missing before ``<function=name>``."""
    begin = _FUNCTION.search(text)
    functions = begin and _FUNCTIONS.match(text, begin.end())
    if not begin or not functions:
        return None
    before = text[: begin.start()].rstrip()
    is_fenced = _FENCE.search(before) is not None and _FENCE_END.fullmatch(text, functions.end()) is not None
    if not is_fenced and (_is_open_before(text, begin.start()) or not _CLOSING_TAGS.fullmatch(text, functions.end())):
        return None
    try:
        calls = read(functions[0], schemas)
    except MalformedCallError as error:
        calls = [malformed_call(error, begin[1].strip())]
    start = _FENCE.search(before).start() if is_fenced else begin.start()  # type: ignore[union-attr]
    return _Found(text[:start], [dataclasses.replace(call, repair=OPENING_TAG) for call in calls])


def _written_plainly(text: str) -> _Found | None:
    """Find calls as JSON or as a Python list, alone in a code fence or at the end of the text."""
    begin = _VALUE.search(text)
    if begin is None or _is_open_before(text, begin.start()):
        return None
    ends = _FENCE_END if begin["fence"] else _CLOSING_TAGS
    if begin["python"] is not None:
        end = text.rfind("]") + 1
        calls = python_calls(text[begin.end() : end], escaped_string)
        return (
            _Found(text[: begin.start()], [dataclasses.replace(one, repair=BARE) for one in calls])
            if ends.fullmatch(text, end)
            else None
        )
    kind, rest = BARE, text[begin.end() :]
    try:
        values, end = _values(rest)
    except MalformedCallError:
        kind, rest = TRAILING_COMMA, _STRING_OR_COMMA.sub(lambda found: found[1] or "", rest)
        try:
            values, end = _values(rest)
        except MalformedCallError:
            return None
    if not ends.fullmatch(rest, end):
        return None
    if not values or not all(map(_has_arguments, values)):
        return None
    return _Found(text[: begin.start()], [_call_of(one, kind) for one in values])


def _values(text: str) -> tuple[list[Any], int]:
    """Parse a list, or objects on lines of their own; return the values and the index after them."""
    value, end = read_json(text)
    if isinstance(value, list):
        return cast("list[Any]", value), end
    values = [value]
    while len(values) <= MAX_CALLS and (line := _NEXT_OBJECT.match(text, end)):
        value, end = read_json(text, line.end())
        values.append(value)
    return values, end


def _is_open_before(text: str, start: int) -> bool:
    """Whether a code fence or a JSON value is open before an index, so that what follows is part of it."""
    before = text[:start].strip()
    if before.startswith(("{", "[")) or before.endswith(("{", "[", ",", '":')) or _OPEN_TAG.search(before):
        return True
    return len(_FENCE_LINE.findall(before)) % 2 == 1


def _has_arguments(value: Any) -> bool:
    fields = cast("dict[str, Any]", value if isinstance(value, dict) else {})
    fields = fields["function"] if isinstance(fields.get("function"), dict) else fields
    return isinstance(fields.get("name"), str) and any(key in fields for key in _WITH_ARGUMENTS)


def _call_of(value: dict[str, Any], kind: str) -> ToolCall:
    fields = value["function"] if isinstance(value.get("function"), dict) else value
    key = next(key for key in _WITH_ARGUMENTS if key in fields)
    given = fields[key]
    try:
        if isinstance(given, str):
            kind, given = ARGUMENTS_TEXT, whole_json(given)
        call = dataclasses.replace(tool_call_from_object({**fields, key: given}), repair=kind)
        return dataclasses.replace(call, name=fields["name"])  # exactly as written
    except MalformedCallError as error:
        return malformed_call(error, str(fields["name"]))
