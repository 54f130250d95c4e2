"""Convert a conversation with tool calls to OpenAI's protocol, and parse the tool calls in a response."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentsgym.agents.openai_client import RequestError
from agentsgym.agents.usage import as_mapping
from agentsgym.texts import shown
from agentsgym.tokens.calls.values import MalformedCallError, malformed_call, tool_call, whole_json
from agentsgym.types import Message, ToolCall


def as_sent(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a conversation to messages that every server accepts.

    The arguments of calls become JSON text, and a call and its result get the same id; a result without an id belongs
    to the first open call of its tool. A result without a call in the last assistant message (for example, because the
    call could not be parsed) becomes a user message, as servers require. Messages between the results of one assistant
    message are moved after the last result, since results must directly follow their calls.
    """
    sent: list[dict[str, Any]] = []
    behind = 0  # the index after the last assistant message and its results
    waiting: list[tuple[str, str]] = []  # id and tool of the calls that have no result yet
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            given, name = message.get("tool_call_id"), message.get("name")
            found = [call for call in waiting if call[0] == given]
            if given is None:
                found = [call for call in waiting if name is None or call[1] == name]
            if not found:
                sent.append({"role": "user", "content": content})
                continue
            waiting.remove(found[0])
            sent.insert(behind, {"role": "tool", "tool_call_id": found[0][0], "content": content})
            behind += 1
            continue
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(message.get("tool_calls") or () if role == "assistant" else ()):
            function = cast("Mapping[str, Any]", call.get("function", call))
            given = function.get("arguments", {})
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            fields = {"name": function["name"], "arguments": arguments}
            calls.append({"id": call.get("id") or f"call_{index}_{number}", "type": "function", "function": fields})
        sent.append({"role": role, "content": content, **({"tool_calls": calls} if calls else {})})
        if role == "assistant":
            waiting, behind = [(call["id"], call["function"]["name"]) for call in calls], len(sent)
    return sent


def calls_in(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Parse the tool calls in a server's message; a call whose arguments cannot be parsed has an ``error``."""
    given: Any = message.get("tool_calls") or ()
    if not isinstance(given, list | tuple):
        raise RequestError(f"the response has tool_calls that are not a list: {shown(given)}")
    calls: list[ToolCall] = []
    for item in cast("Sequence[Any]", given):
        call = as_mapping(item)
        if not isinstance(call.get("function"), Mapping):
            raise RequestError(f"the response has a tool call without a function: {shown(item)}")
        function = as_mapping(call["function"])
        name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
        try:
            read = whole_json(arguments or "{}") if isinstance(arguments, str | None) else arguments
            calls.append(tool_call(name, read, call_id))
        except MalformedCallError as error:
            failed = malformed_call(error, name if isinstance(name, str) else "")
            calls.append(dataclasses.replace(failed, id=call_id if isinstance(call_id, str) else None))
    return tuple(calls)


def reasoning_in(message: Mapping[str, Any]) -> str | None:
    """Return the model's reasoning from the fields that vLLM, SGLang and others use; None if there is none."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key]:
            return str(message[key])
    return None
