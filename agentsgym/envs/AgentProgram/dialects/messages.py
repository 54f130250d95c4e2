"""Anthropic's messages, ``POST /v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects import shared
from agentsgym.envs.AgentProgram.dialects.shared import Conversations, Dialect, Part
from agentsgym.fields import is_int, is_str
from agentsgym.types import Message

_ROLES: Final = ("user", "assistant", "system")
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
Fields = dict[str, Any]


class _Messages(Dialect):
    path = "/v1/messages"

    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        whole = shared.whole_body(body)
        if whole.at("thread").value is not None:  # the SDK then sends the conversation again, without a thread
            problem = "thread is not supported: send the whole conversation"
            raise CallError(problem, param="thread", code="thread_unsupported_request")
        given, system, form = whole.at("messages"), whole.at("system"), whole.at("output_config").at("format")
        messages = [message for item in given.items("a list of messages") for message in _parsed(item)]
        shared.check_format(form, form.at("schema"))
        instructions = "" if system.value is None else system.text()
        head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        return CallRequest(
            **shared.common_fields(whole),
            messages=shared.conversation(given, messages, head),
            tools=shared.tools_of(whole, ("custom", ""), "input_schema"),
            max_new_tokens=whole.at("max_tokens").required(is_int(1), "a positive int"),
            stop=whole.at("stop_sequences").stop_texts(),
        )

    def respond(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Fields:
        (reply,) = replies
        reason = "end_turn" if reply.stopped_by is None else "stop_sequence"
        if reply.finish_reason == "length" or reply.tool_calls:
            reason = "max_tokens" if reply.finish_reason == "length" else "tool_use"
        end = {"stop_reason": reason, "stop_sequence": reply.stopped_by if reason == "stop_sequence" else None}
        usage = {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)}
        head = {"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "model": request.model}
        return {**head, "content": _blocks(reply), **end, "usage": usage, **shared.record(request, replies)}

    def stream(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[str]:
        for data in self._events(self.respond(request, replies, created)):
            yield shared.event(data)

    def error(self, error: CallError) -> Fields:
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        details = {} if error.code is None else {"details": {"error_code": error.code}}
        return {"type": "error", "error": {"type": kind, "message": error.message, **details}}

    def _events(self, whole: Fields) -> Iterator[Fields]:
        usage = whole["usage"]
        end = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        begun: Fields = {**whole, "content": [], **dict.fromkeys(end), "usage": {**usage, "output_tokens": 0}}
        yield {"type": "message_start", "message": begun}
        for index, block in enumerate(whole["content"]):
            empty, *deltas = _pieces(block)
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop"}


def _parsed(part: Part) -> list[Fields]:
    """Return one message, or several for a user's message with the results of tools, each of which is a message."""
    role = part.at("role").choice(_ROLES)
    content = part.at("content")
    if not isinstance(content.value, list) or role == "system":
        return [{"role": role, "content": content.text()}]
    blocks = content.items()
    return [_assistant(blocks)] if role == "assistant" else _from_user(blocks)


def _assistant(blocks: Sequence[Part]) -> Fields:
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[Fields] = []
    for block in blocks:
        kind = block.kind()
        if kind == "tool_use":
            calls.append(shared.written_call(block.at("id"), block.at("name"), block.at("input")))
        elif kind in texts:
            texts[kind].append(block.at(kind).required(is_str, "a string"))
        elif kind != "redacted_thinking":
            raise block.unreadable()
    message: Fields = {"role": "assistant", "content": "\n".join(texts["text"])}
    thinking = {"reasoning_content": "\n".join(texts["thinking"])} if any(texts["thinking"]) else {}
    return {**message, **thinking, **({"tool_calls": calls} if calls else {})}


def _from_user(blocks: Sequence[Part]) -> list[Fields]:
    """Return the results of tools as messages of their own, and the texts between them as messages of the user."""
    messages: list[Fields] = []
    for block in blocks:
        if block.kind() == "tool_result":
            call_id = block.at("tool_use_id").required(is_str, "the id of a tool_use block")
            content = block.at("content")
            text = "" if content.value is None else content.text()
            messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
        else:
            text = block.own_text()
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _blocks(reply: Reply) -> list[Fields]:
    thinking = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}] if reply.reasoning else []
    text = [{"type": "text", "text": reply.text}] if reply.has_text else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in reply.tool_calls
    ]
    return [*thinking, *text, *calls]


def _pieces(block: Fields) -> tuple[Fields, ...]:
    """Return the block as it begins, without its text, and the deltas that complete it."""
    kind = block["type"]
    if kind == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    delta = {"type": f"{kind}_delta", kind: block[kind]}
    return {**block, kind: ""}, delta


MESSAGES: Final = _Messages()
