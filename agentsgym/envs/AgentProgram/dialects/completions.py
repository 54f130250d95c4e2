"""OpenAI's chat completions, ``POST /v1/chat/completions``, and text completions, ``POST /v1/completions``.

Both are requests for ``n`` answers, and have responses with ``choices``.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects import shared
from agentsgym.envs.AgentProgram.dialects.shared import Conversations, Dialect, Part
from agentsgym.fields import is_dict, is_int, is_list, is_str

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_PLAIN: Final = ("system", "user", "assistant")
_UNSUPPORTED_CHAT: Final = {
    "functions": "give them as tools",
    "function_call": "give tool_choice",
    "audio": "the policy writes text only",
}
_UNSUPPORTED: Final = {"echo": "the program has the prompt already", "suffix": "the policy only continues a text"}
_MAX_ANSWERS: Final = 128
Fields = dict[str, Any]


def _choice_fields(body: Part) -> Fields:
    """Return the fields of :class:`CallRequest` that both APIs name alike."""
    n = body.at("n").optional(lambda n: is_int(1)(n) and n <= _MAX_ANSWERS, f"an int from 1 to {_MAX_ANSWERS}")
    return {
        **shared.common_fields(body),
        "max_new_tokens": body.at("max_tokens").budget(),
        "stop": body.at("stop").stop_texts(),
        "n": n or 1,
        "include_usage": body.at("stream_options").at("include_usage").is_true(),
    }


class _ChoicesDialect(Dialect):
    """The responses of an API whose answers are ``choices``."""

    prefix: ClassVar[str]  # of the ids of its responses
    kind: ClassVar[str]  # the ``object`` of a response
    chunk_kind: ClassVar[str]  # the ``object`` of an event

    @abstractmethod
    def answer(self, request: CallRequest, reply: Reply) -> Fields:
        """Return the fields of a choice that contain the answer."""

    def deltas(self, request: CallRequest, reply: Reply) -> Sequence[Fields]:
        """Return the fields of a choice in each of its events, of which the first contains the whole answer."""
        return (self.answer(request, reply),)

    def respond(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Fields:
        choices = [
            {"index": index, "finish_reason": _finish(reply), **self.answer(request, reply)}
            for index, reply in enumerate(replies)
        ]
        head = self._head(request, replies, created, self.kind)
        return {**head, "choices": choices, "usage": _usage(replies), **shared.record(request, replies)}

    def stream(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[str]:
        head = self._head(request, replies, created, self.chunk_kind)
        if request.include_usage:
            head["usage"] = None
        for index, reply in enumerate(replies):
            deltas = self.deltas(request, reply)
            for fields in deltas:
                reason = _finish(reply) if fields is deltas[-1] else None
                yield shared.event({**head, "choices": [{"index": index, "finish_reason": reason, **fields}]})
        if request.include_usage:
            yield shared.event({**head, "choices": [], "usage": _usage(replies)})
        yield "data: [DONE]\n\n"

    def _head(self, request: CallRequest, replies: Sequence[Reply], created: int, kind: str) -> Fields:
        return {"id": self.prefix + replies[0].call_id, "object": kind, "created": created, "model": request.model}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Count the tokens of the prompt, which the answers share, and of all answers."""
    prompt, answers = len(replies[0].prompt_ids), sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


class _Completions(_ChoicesDialect):
    path = "/v1/completions"
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        whole = shared.whole_body(body)
        whole.reject(_UNSUPPORTED)
        whole.at("best_of").optional(lambda value: value == 1, "1, since each answer is returned: give n")
        return CallRequest(
            **_choice_fields(whole),
            prompt=_prompt(whole.at("prompt")),
            logprobs=whole.at("logprobs").optional(is_int(0), "an int of at least 0") is not None,
        )

    def answer(self, request: CallRequest, reply: Reply) -> Fields:
        tokens = shared.token_logprobs(request, reply)
        if tokens is None:
            return {"text": reply.text, "logprobs": None}
        logprobs = {
            "tokens": [one["token"] for one in tokens],
            "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": [{one["token"]: one["logprob"]} for one in tokens],
            "text_offset": list(accumulate((len(one["token"]) for one in tokens), initial=0))[:-1],
        }
        return {"text": reply.text, "logprobs": logprobs}


def _prompt(part: Part) -> str | Sequence[int]:
    value = part.value
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        part, *others = part.items()
        if others:
            problem = f"prompt must be one prompt, got {len(others) + 1}: send a request for each"
            raise CallError(problem, param="prompt")
    return part.required(
        lambda value: bool(value) and (is_str(value) or (is_list(value) and all(map(is_int(0), value)))),
        "a non-empty string or list of token ids",
    )


COMPLETIONS: Final = _Completions()


class _Chat(_ChoicesDialect):
    path = "/v1/chat/completions"
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        whole = shared.whole_body(body)
        whole.reject(_UNSUPPORTED_CHAT)
        messages = whole.at("messages")
        fields = _choice_fields(whole)
        fields["max_new_tokens"] = whole.at("max_completion_tokens").budget() or fields["max_new_tokens"]
        form = whole.at("response_format")
        shared.check_format(form, form.at("json_schema").at("schema"))
        return CallRequest(
            **fields,
            messages=shared.conversation(messages, [_message(item) for item in messages.items("a list of messages")]),
            tools=shared.tools_of(whole, ("function",), "parameters", inner="function"),
            logprobs=whole.at("logprobs").is_true(),
        )

    def answer(self, request: CallRequest, reply: Reply) -> Fields:
        message: Fields = {**shared.answer_message(reply), "content": reply.text if reply.has_text else None}
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        tokens = shared.token_logprobs(request, reply)
        return {"message": message, "logprobs": None if tokens is None else {"content": tokens, "refusal": None}}

    def deltas(self, request: CallRequest, reply: Reply) -> Sequence[Fields]:
        fields = self.answer(request, reply)
        delta = fields.pop("message")
        for index, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = index
        return {"delta": delta, **fields}, {"delta": {}}


def _message(part: Part) -> Fields:
    value = part.value
    # Most messages of a long history stay as they are: on the path of every call, so without parts.
    if is_dict(value) and len(value) == 2 and value.get("role") in _PLAIN and type(value.get("content")) is str:
        return {**value}
    role = part.at("role").choice(_ROLES)
    content = part.at("content")
    if role == "assistant":
        text = "" if content.value is None else content.text()
        named = [part.at(key).optional(is_str, "a string") for key in ("reasoning_content", "reasoning")]
        thoughts = {"reasoning_content": named[0] or named[1]} if any(named) else {}
        part.reject({"function_call": "give it as one of tool_calls"})
        given = [(one.at("id"), one.at("function")) for one in part.at("tool_calls").items("a list of tool calls")]
        calls = [shared.written_call(call_id, one.at("name"), one.at("arguments")) for call_id, one in given]
        return {"role": role, "content": text, **thoughts, **({"tool_calls": calls} if calls else {})}
    message = {"role": "system" if role == "developer" else role, "content": content.text()}
    if role == "tool":
        message["tool_call_id"] = part.at("tool_call_id").required(is_str, "the id of a tool call")
    return message


CHAT: Final = _Chat()
