"""OpenAI's text completions, ``POST /v1/completions``, and what chat completions share with them.

These are requests for ``n`` answers, and responses with ``choices``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects.parts import Part, whole_body
from agentsgym.envs.AgentProgram.dialects.shared import (
    UNKNOWN_LOGPROB,
    Conversations,
    Dialect,
    budget,
    common_fields,
    event,
    finite,
    is_true,
    record,
    reject,
    stop_texts,
)
from agentsgym.fields import is_int, is_list, is_str

_MAX_ANSWERS = 128
_UNSUPPORTED: Final = {"echo": "the program has the prompt already", "suffix": "the policy only continues a text"}
Fields = dict[str, Any]


def choice_fields(body: Part) -> Fields:
    """Return the fields of :class:`CallRequest` that both APIs name alike."""
    n = body.at("n").optional(is_int(1), "a positive int") or 1
    if n > _MAX_ANSWERS:
        raise body.at("n").wrong(f"at most {_MAX_ANSWERS}")
    return {
        **common_fields(body),
        "max_new_tokens": budget(body.at("max_tokens")),
        "stop": stop_texts(body.at("stop")),
        "n": n,
        "include_usage": is_true(body.at("stream_options").at("include_usage")),
    }


class ChoicesDialect(Dialect):
    """The responses of an API whose answers are ``choices``.

    Attributes:
        prefix: The beginning of the ids of its responses.
        kind: The ``object`` of a response.
        chunk_kind: The ``object`` of an event.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def answer(self, request: CallRequest, reply: Reply) -> Fields:
        """Return the fields of a choice that contain the answer."""

    @abstractmethod
    def deltas(self, request: CallRequest, reply: Reply) -> Sequence[Fields]:
        """Return the fields of a choice in each of its events, of which the first contains the whole answer."""

    def respond(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Fields:
        """Return the body of a response that is not streamed."""
        choices = [
            {"index": index, "finish_reason": _finish(reply), **self.answer(request, reply)}
            for index, reply in enumerate(replies)
        ]
        head = self._head(request, replies, created, self.kind)
        return {**head, "choices": choices, "usage": _usage(replies), **record(request, replies)}

    def stream(self, request: CallRequest, replies: Sequence[Reply], created: int) -> Iterator[str]:
        """Return the events: those of each choice, the usage if it was requested, and the end."""
        head = self._head(request, replies, created, self.chunk_kind)
        if request.include_usage:
            head["usage"] = None
        for index, reply in enumerate(replies):
            deltas = self.deltas(request, reply)
            for fields in deltas:
                reason = _finish(reply) if fields is deltas[-1] else None
                yield event({**head, "choices": [{"index": index, "finish_reason": reason, **fields}]})
        if request.include_usage:
            yield event({**head, "choices": [], "usage": _usage(replies)})
        yield "data: [DONE]\n\n"

    def _head(self, request: CallRequest, replies: Sequence[Reply], created: int, kind: str) -> Fields:
        return {"id": self.prefix + replies[0].call_id, "object": kind, "created": created, "model": request.model}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Count the tokens of the prompt, which the answers share, and of all answers."""
    prompt, answers = len(replies[0].prompt_ids), sum(len(reply.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


class _Completions(ChoicesDialect):
    path = "/v1/completions"
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def parse(self, body: Mapping[str, Any], conversations: Conversations) -> CallRequest:
        whole = whole_body(body)
        reject(whole, _UNSUPPORTED)
        whole.at("best_of").optional(lambda value: value == 1, "1, since each answer is returned: give n")
        return CallRequest(
            **choice_fields(whole),
            prompt=_prompt(whole.at("prompt")),
            logprobs=whole.at("logprobs").optional(is_int(0), "an int of at least 0") is not None,
        )

    def answer(self, request: CallRequest, reply: Reply) -> dict[str, Any]:
        return {"text": reply.text, "logprobs": _logprobs(request, reply)}

    def deltas(self, request: CallRequest, reply: Reply) -> Sequence[dict[str, Any]]:
        return (self.answer(request, reply),)


def _prompt(part: Part) -> str | Sequence[int]:
    value = part.value
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        part, *others = part.items()
        if others:
            problem = f"prompt must be one prompt, got {len(others) + 1}: send a request for each"
            raise CallError(problem, param="prompt")
    return part.required(_is_prompt, "a non-empty string or list of token ids")


def _is_prompt(value: Any) -> bool:
    return bool(value) and (is_str(value) or (is_list(value) and all(map(is_int(0), value))))


def _logprobs(request: CallRequest, reply: Reply) -> dict[str, Any] | None:
    """Return the log-probability of each sampled token, which is also the only one of its alternatives."""
    if not request.logprobs or reply.logprobs is None:
        return None
    texts, logprobs = list(reply.token_texts), finite(reply.logprobs, UNKNOWN_LOGPROB)
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)],
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
    }


COMPLETIONS: Final = _Completions()
