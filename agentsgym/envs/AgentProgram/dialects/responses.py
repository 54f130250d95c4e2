"""OpenAI's responses, ``POST /v1/responses``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects import shared
from agentsgym.envs.AgentProgram.dialects.shared import Conversations, Dialect, Part
from agentsgym.fields import is_str
from agentsgym.texts import shown
from agentsgym.types import Message

_PREFIX: Final = "resp_"
_LOGPROBS: Final = "message.output_text.logprobs"  # an item of ``include``
_ROLES: Final = ("system", "developer", "user", "assistant")
_UNSUPPORTED: Final = {
    "conversation": "give previous_response_id or the whole input",
    "prompt": "give the whole input",
    "background": "wait for the response",
}
# Fields of a request that its response repeats, with their defaults.
_REPEATED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
Fields = dict[str, Any]


class _Responses(Dialect):
    path = "/v1/responses"

    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        whole = shared.whole_body(body)
        whole.reject(_UNSUPPORTED)
        instructions = whole.at("instructions").optional(is_str, "a string")
        earlier = _earlier(whole.at("previous_response_id"), conversations)
        if instructions:
            earlier = (Message(role="system", content=instructions), *earlier)
        given, form = whole.at("input"), whole.at("text").at("format")
        shared.check_format(form, form.at("schema"))
        return CallRequest(
            **shared.common_fields(whole),
            messages=shared.conversation(given, _messages(given), earlier),
            tools=shared.tools_of(whole, ("function",), "parameters"),
            max_new_tokens=whole.at("max_output_tokens").budget(),
            logprobs=any(item.value == _LOGPROBS for item in whole.at("include").items()),
            extra={key: default if body.get(key) is None else body[key] for key, default in _REPEATED.items()},
        )

    def respond(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Fields:
        (reply,) = replies
        prompt, answer = len(reply.prompt_ids), len(reply.token_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + answer,
        }
        return {
            **_head(request, reply, created),
            "status": _status(reply),
            "incomplete_details": None if reply.finish_reason == "stop" else {"reason": "max_output_tokens"},
            "output": _output(request, reply),
            "usage": usage,
            **shared.record(request, replies),
        }

    def stream(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[str]:
        for number, data in enumerate(self._events(request, replies, created)):
            yield shared.event({**data, "sequence_number": number})

    def _events(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[Fields]:
        begun: Fields = {**_head(request, replies[0], created), "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(_output(request, replies[0])):
            yield from _item_events(item, index)
        yield {"type": f"response.{_status(replies[0])}", "response": self.respond(request, replies, created)}


def _earlier(part: Part, conversations: Conversations) -> Sequence[Message]:
    response_id = part.optional(is_str, "the id of a response")
    if response_id is None:
        return ()
    found = conversations(response_id.removeprefix(_PREFIX))
    if found is None:
        problem = f"{part.name} must be the id of an earlier response of this program, got {shown(response_id)}"
        raise CallError(problem, param=part.name, code="previous_response_not_found")
    return found


def _messages(part: Part) -> list[Fields]:
    if isinstance(part.value, str):
        return [{"role": "user", "content": part.value}]
    messages: list[Fields] = []
    for item in part.items("a string or a list of items"):
        kind = item.at("type").choice(_ITEMS) if item.kind() else "message"
        _ITEMS[kind](item, messages)
    return messages


def _answer(messages: list[Fields], *closing: str) -> Fields:
    """Return the assistant message that an item belongs to: the last one, unless it has a ``closing`` field."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(map(last.get, closing)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(item: Part, messages: list[Fields]) -> None:
    role = item.at("role").choice(_ROLES)
    content = item.at("content").text()
    if role == "assistant":
        _answer(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_reasoning(item: Part, messages: list[Fields]) -> None:
    given = item.at("content") if item.at("content").value else item.at("summary")
    if given.value and (text := given.text()):
        _answer(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text


def _add_call(item: Part, messages: list[Fields]) -> None:
    call = shared.written_call(item.at("call_id"), item.at("name"), item.at("arguments"))
    _answer(messages).setdefault("tool_calls", []).append(call)


def _add_result(item: Part, messages: list[Fields]) -> None:
    call_id = item.at("call_id").required(is_str, "the id of a tool call")
    messages.append({"role": "tool", "content": item.at("output").text(), "tool_call_id": call_id})


_ITEMS: Final[Mapping[str, Callable[[Part, list[Fields]], None]]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_result,
}


def _head(request: CallRequest, reply: Reply, created: int) -> Fields:
    head = {"id": _PREFIX + reply.call_id, "object": "response", "created_at": created, "model": request.model}
    return {**head, "error": None, "incomplete_details": None, **request.extra}


def _status(reply: Reply) -> str:
    return "completed" if reply.finish_reason == "stop" else "incomplete"


def _output(request: CallRequest, reply: Reply) -> list[Fields]:
    items: list[Fields] = []
    if reply.reasoning:
        thoughts = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"id": f"rs_{reply.call_id}", "type": "reasoning", "summary": [], "content": thoughts})
    if reply.has_text:
        logprobs = shared.token_logprobs(request, reply) or []
        content: list[Fields] = [{"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}]
        items.append({"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "content": content})
    for index, call in enumerate(reply.tool_calls):
        names = {"id": f"fc_{reply.call_id}_{index}", "call_id": call.id, "name": call.name}
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        items.append({"type": "function_call", **names, "arguments": arguments})
    return [{**item, "status": _status(reply) if item is items[-1] else "completed"} for item in items]


def _item_events(item: Fields, index: int) -> Iterator[Fields]:
    """Yield the events of one item: it begins empty, its text follows in one piece, and it ends whole."""
    key = "arguments" if item["type"] == "function_call" else "content"
    empty = {**item, "status": "in_progress", key: type(item[key])()}
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    place = {"item_id": item["id"], "output_index": index}
    if key == "arguments":
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item[key]}
        yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": item[key]}
    else:
        (part,) = item["content"]
        place["content_index"] = 0
        kind = part["type"]
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": f"response.{kind}.delta", **place, "delta": part["text"], **logprobs}
        yield {"type": f"response.{kind}.done", **place, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def carried_over(call: CallRequest, reply: Reply) -> list[Message]:
    """Return the conversation that a later request continues by the id of a reply: it gives its own instructions."""
    return [*call.messages[1 if call.extra.get("instructions") else 0 :], shared.answer_message(reply)]


RESPONSES: Final = _Responses()
