"""What chat completions and text completions share: requests for ``n`` answers, and responses with ``choices``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from agentsgym.envs.AgentProgram.calls import CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects.parts import Part
from agentsgym.envs.AgentProgram.dialects.shared import (
    Dialect,
    budget,
    common_fields,
    event,
    is_true,
    record,
    stop_texts,
)
from agentsgym.fields import is_int

_MAX_ANSWERS = 128
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
