"""OpenAI's chat completions, ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentsgym.envs.AgentProgram.calls import CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects.completions import ChoicesDialect, choice_fields
from agentsgym.envs.AgentProgram.dialects.parts import Part, whole_body
from agentsgym.envs.AgentProgram.dialects.shared import (
    UNKNOWN_LOGPROB,
    Conversations,
    arguments_text,
    budget,
    conversation,
    finite,
    has_text,
    is_true,
    json_schema_of,
    reject,
    text_of,
    tools_of,
    written_call,
)
from agentsgym.fields import is_dict, is_str

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_PLAIN: Final = ("system", "user", "assistant")
_UNSUPPORTED: Final = {
    "functions": "give them as tools",
    "function_call": "give tool_choice",
    "audio": "the policy writes text only",
}


class _Chat(ChoicesDialect):
    path = "/v1/chat/completions"
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        whole = whole_body(body)
        reject(whole, _UNSUPPORTED)
        messages = whole.at("messages")
        fields = choice_fields(whole)
        fields["max_new_tokens"] = budget(whole.at("max_completion_tokens")) or fields["max_new_tokens"]
        form = whole.at("response_format")
        return CallRequest(
            **fields,
            messages=conversation(messages, [_message(item) for item in messages.items("a list of messages")]),
            tools=tools_of(whole, ("function",), "parameters", inner="function"),
            logprobs=is_true(whole.at("logprobs")),
            json_schema=json_schema_of(form, form.at("json_schema").at("schema")),
        )

    def answer(self, request: CallRequest, reply: Reply) -> dict[str, Any]:
        return {"message": _written(reply), "logprobs": _logprobs(request, reply)}

    def deltas(self, request: CallRequest, reply: Reply) -> Sequence[dict[str, Any]]:
        delta = _written(reply)
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        return {"delta": delta, "logprobs": _logprobs(request, reply)}, {"delta": {}}


def _message(part: Part) -> dict[str, Any]:
    if _is_plain(part.value):
        return {**part.value}
    role = part.at("role").choice(_ROLES)
    content = part.at("content")
    if role == "assistant":
        text = "" if content.value is None else text_of(content)
        named = [part.at(key).optional(is_str, "a string") for key in ("reasoning_content", "reasoning")]
        thoughts = {"reasoning_content": named[0] or named[1]} if any(named) else {}
        return {"role": role, "content": text, **thoughts, **_calls(part)}
    message = {"role": "system" if role == "developer" else role, "content": text_of(content)}
    if role == "tool":
        message["tool_call_id"] = part.at("tool_call_id").required(is_str, "the id of a tool call")
    return message


def _is_plain(value: Any) -> bool:
    """Whether a message stays as it is, as most of a long history do: on the path of every call, so without parts."""
    return is_dict(value) and len(value) == 2 and value.get("role") in _PLAIN and type(value.get("content")) is str


def _calls(part: Part) -> dict[str, Any]:
    reject(part, {"function_call": "give it as one of tool_calls"})
    calls: list[dict[str, Any]] = []
    for call in part.at("tool_calls").items("a list of tool calls"):
        function = call.at("function")
        calls.append(written_call(call.at("id"), function.at("name"), function.at("arguments")))
    return {"tool_calls": calls} if calls else {}


def _written(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text if has_text(reply) else None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}
            for call in reply.tool_calls
        ]
    return message


def _logprobs(request: CallRequest, reply: Reply) -> dict[str, Any] | None:
    """Return the log-probability of each sampled token, which is also the only one of its alternatives."""
    if not request.logprobs or reply.logprobs is None:
        return None
    tokens: list[dict[str, Any]] = []
    for text, logprob in zip(reply.token_texts, finite(reply.logprobs, UNKNOWN_LOGPROB), strict=True):
        token = {"token": text, "bytes": list(text.encode(errors="replace")), "logprob": logprob}
        tokens.append({**token, "top_logprobs": [token]})
    return {"content": tokens, "refusal": None}


CHAT: Final = _Chat()
