"""What the dialects share: their interface, the parts of a body, texts, tools, calls, records of tokens, and events."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, cast

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.tool_schemas import schemas_of
from agentsgym.errors import ConfigError
from agentsgym.fields import Check, is_bool, is_dict, is_int, is_number, is_str, one_of
from agentsgym.texts import shown, visible
from agentsgym.tokens.calls.values import MAX_DEPTH, MalformedCallError, whole_json
from agentsgym.tokens.tool_messages import structured_calls
from agentsgym.types import Message

_LARGEST: Final = sys.float_info.max  # of numbers; larger ints are not finite as a float
_MAX_KEYS: Final = 8  # in the name of a part
_MAX_STOPS: Final = 16
_TEXT_KINDS: Final = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
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

    def is_true(self) -> bool:
        """Return an optional bool, by default False."""
        return self.optional(is_bool, "true or false") or False

    def reject(self, unsupported: Mapping[str, str]) -> None:
        """Raise :class:`CallError` for a field that is given but ``unsupported``, which has what to do instead."""
        for key, advice in unsupported.items():
            if self.at(key).value not in (None, False, "", [], {}):
                raise CallError(f"{key} is not supported: {advice}", param=key)

    def budget(self) -> int | None:
        """Return a token budget; None without a limit."""
        return self.optional(is_int(1), "a positive int")

    def stop_texts(self) -> tuple[str, ...]:
        """Return the texts that end an answer, given as one string or as a list."""
        part = Part(self.name, [self.value]) if isinstance(self.value, str) else self
        expected = f"a string or a list of at most {_MAX_STOPS} strings"
        part.optional(lambda value: isinstance(value, list) and len(cast("list[Any]", value)) <= _MAX_STOPS, expected)
        return tuple(one.required(lambda value: is_str(value) and value, "a non-empty string") for one in part.items())

    def text(self) -> str:
        """Return a text that is given as one string or as a list of parts, which are joined by newlines."""
        given = self.required(lambda value: isinstance(value, str | list), "a string or a list of parts")
        return given if isinstance(given, str) else "\n".join(part.own_text() for part in self.items())

    def own_text(self) -> str:
        """Return the text of one part of a content."""
        kind = self.kind()
        if kind not in _TEXT_KINDS:
            raise self.unreadable()
        return self.at("refusal" if kind == "refusal" else "text").required(is_str, "a string")

    def unreadable(self) -> CallError:
        """Return the error of a part of a content that is not text."""
        kind = self.at("type")
        if kind.value is None:
            return kind.wrong("the type of the part, such as 'text'")
        problem = f"{kind.name} is {shown(kind.value, 60)}, but the policy reads text only: leave the part out"
        return CallError(problem, param=kind.name)


def whole_body(body: Any) -> Part:
    """Return the body as a part after a check of all its values.

    Raises:
        CallError: The body is not an object; or it contains half of a surrogate pair, a number that is not finite or
            too large, or values that are nested too deeply, which JSON may contain but no tokenizer accepts.
    """
    if _problem(body, MAX_DEPTH):
        name, problem = _first_problem(body, MAX_DEPTH)
        raise CallError(f"{name or 'the body'} {problem}", param=name or None)
    whole = Part(name="", value=body)
    whole.required(is_dict, "an object")
    return whole


def _problem(whole: Any, depth: int) -> str:
    """Return what is wrong with a value of at most this depth; empty for nothing. On the path of every call."""
    level: list[Any] = [whole]
    for _ in range(depth + 1):
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
                    return "contains half of a surrogate pair, which is not valid Unicode"
            elif value is not None and not -_LARGEST <= value <= _LARGEST:  # or NaN
                return "contains a number that is not finite or has too many digits"
        level = below
    return f"is nested more than {MAX_DEPTH} deep" if level else ""


def _first_problem(value: Any, depth: int, name: str = "") -> tuple[str, str]:
    """Return the name of the first value with a problem, of at most :data:`_MAX_KEYS` keys, and what is wrong."""
    inner: Iterable[tuple[Any, Any]] = enumerate(cast("list[Any]", value)) if isinstance(value, list) else ()
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        inner = (*fields.items(), *zip(fields, fields, strict=True))
    for key, item in inner if depth > MAX_DEPTH - _MAX_KEYS else ():
        if _problem(item, depth - 1):
            step = f"[{key}]" if isinstance(key, int) else f".{visible(key)[:60]}" if name else visible(key)[:60]
            return _first_problem(item, depth - 1, name + step)
    return name, _problem(value, depth)


_UNKNOWN_LOGPROB: Final = -9999.0  # the SDKs accept only numbers, and OpenAI gives this one to very unlikely tokens
_TOOL_CHOICES: Final = ("auto", "none", "required", "any", "function", "tool", "allowed_tools")
# The trainer decides how its policy samples, so that these are only checked.
_SAMPLING: Final[Mapping[str, tuple[Check, str]]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        (is_number(), "a finite number"),
    ),
    **dict.fromkeys(("seed", "top_logprobs"), (lambda value: isinstance(value, int), "an int")),
    "logit_bias": (is_dict, "an object"),
    "parallel_tool_calls": (is_bool, "true or false"),
}

Conversations = Callable[[str], Sequence[Message] | None]
"""Returns the conversation that ended with the reply of this ``call_id``, the reply included; None if unknown."""


class Dialect(ABC):
    """One API; each is a module-level object without state."""

    path: ClassVar[str]  # of its endpoint, such as "/v1/chat/completions"

    @abstractmethod
    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        """Check the parsed JSON body of a request and convert it.

        Raises:
            CallError: A value is missing, has the wrong type, or is not supported; the message describes a valid value.
        """

    @abstractmethod
    def respond(self, request: CallRequest, replies: Sequence[Reply], created: int) -> dict[str, Any]:
        """Return the body of a response that is not streamed; ``created`` is in seconds since 1970."""

    @abstractmethod
    def stream(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[str]:
        """Return the server-sent events of a response, each complete with its blank line."""

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the body of an error, by default in the form of OpenAI's APIs."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def common_fields(body: Part) -> dict[str, Any]:
    """Return the fields of :class:`CallRequest` that all APIs name alike, after a check of the sampling parameters."""
    for name, (valid, expected) in _SAMPLING.items():
        body.at(name).optional(valid, expected)
    return {
        "model": body.at("model").required(is_str, "a string"),
        "streams": body.at("stream").is_true(),
        "token_ids": body.at("return_token_ids").is_true(),
    }


def tools_of(body: Part, kinds: Sequence[str], schema: str, inner: str = "") -> tuple[dict[str, Any], ...]:
    """Return the tools that a body offers, in OpenAI's form; none if ``tool_choice`` is ``none``.

    A choice that requires a call is accepted, since harnesses send it by default, but not enforced: the policy in
    training decides by itself, and an answer without a call is the harness's to handle.

    Args:
        body: The body.
        kinds: The types of tools that the program itself runs, the usual one first.
        schema: The name of the field with the schema of a tool's arguments.
        inner: The name of the field with a tool's name, description and schema; empty if they are its own fields.

    Raises:
        CallError: A tool or ``tool_choice`` is not valid, or the API's own servers would run a tool.
    """
    tools: list[dict[str, Any]] = []
    for tool in body.at("tools").items("a list of tools"):
        if tool.kind() not in kinds:
            raise tool.at("type").wrong(f"{kinds[0]!r}, a tool that the program itself runs")
        fields = tool.at(inner) if inner else tool
        function = {"name": fields.at("name").value, "description": fields.at("description").value}
        tools.append({"type": "function", "function": {**function, "parameters": fields.at(schema).value}})
    try:
        schemas = schemas_of(tools, "the request")
    except ConfigError as error:
        raise CallError(str(error), param="tools") from error
    choice = body.at("tool_choice")
    mode = choice.kind() if is_dict(choice.value) else choice.value
    if mode not in (None, *_TOOL_CHOICES):
        raise choice.wrong(f"one of {', '.join(map(repr, _TOOL_CHOICES))}, or an object with such a type")
    return () if mode == "none" else schemas


def written_call(call_id: Part, name: Part, arguments: Part) -> dict[str, Any]:
    """Return a tool call of the history as messages contain it; arguments that are not a JSON object stay text."""
    given: Any = arguments.required(lambda value: isinstance(value, str | dict), "a string of JSON")
    if isinstance(given, str):
        with contextlib.suppress(MalformedCallError):
            parsed = whole_json(given or "{}")
            given = cast("Any", parsed if isinstance(parsed, dict) else given)
    function = {"name": name.required(is_str, "the name of a tool"), "arguments": given}
    return {"type": "function", "id": call_id.required(is_str, "the id of the call"), "function": function}


def conversation(
    part: Part, messages: Sequence[Mapping[str, Any]], earlier: Sequence[Message] = ()
) -> tuple[Message, ...]:
    """Return a conversation in which each tool result has the name of its tool, as some chat templates print it.

    Raises:
        CallError: The part of the body has no messages, whatever was ``earlier``.
    """
    if not messages:
        raise CallError(f"{part.name} must contain at least one message", param=part.name)
    names: dict[str | None, str] = {}
    whole: list[Message] = []
    for message in (*earlier, *messages):
        if "tool_calls" in message:
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        name = names.get(message["tool_call_id"]) if "tool_call_id" in message else None
        whole.append(cast("Message", message if name is None else {**message, "name": name}))
    return tuple(whole)


def answer_message(reply: Reply) -> Message:
    """Return the reply as the message that the program will send back as part of its next request."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = structured_calls(reply.tool_calls, 0)
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    return message


def record(request: CallRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the extra field of a response: its calls, with their exact tokens if they are requested."""
    calls: list[dict[str, Any]] = [{"id": reply.call_id} for reply in replies]
    if request.token_ids:
        for call, reply in zip(calls, replies, strict=True):
            call["prompt_token_ids"], call["token_ids"] = list(reply.prompt_ids), list(reply.token_ids)
            call["logprobs"] = None if reply.logprobs is None else finite(reply.logprobs)
    return {"agentsgym": {"calls": calls}}


def token_logprobs(request: CallRequest, reply: Reply) -> list[dict[str, Any]] | None:
    """Return the log-probability of each sampled token, which is also the only one of its alternatives."""
    if not request.logprobs or reply.logprobs is None:
        return None
    tokens: list[dict[str, Any]] = []
    for text, logprob in zip(reply.token_texts, finite(reply.logprobs, _UNKNOWN_LOGPROB), strict=False):
        token = {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": logprob}
        tokens.append({**token, "top_logprobs": [token]})
    return tokens


def finite(logprobs: Sequence[float], unknown: float | None = None) -> list[float | None]:
    """Return log-probabilities with another value for those that are unknown, since JSON has no NaN."""
    return [value if math.isfinite(value) else unknown for value in logprobs]


def event(data: Mapping[str, Any]) -> str:
    """Return one server-sent event, whose name is its type if it has one."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"


def check_format(form: Part, schema: Part) -> None:
    """Check a response format, and the schema of one of the type ``json_schema``; neither is enforced."""
    if form.value is not None and form.at("type").choice(("text", "json_object", "json_schema")) == "json_schema":
        schema.required(is_dict, "a JSON schema")
