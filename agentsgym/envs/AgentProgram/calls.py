"""One call of a program and its answers, in a form that all APIs share.

::

    HTTP body ─▶ dialect.parse ─▶ CallRequest ─▶ policy ─▶ Reply ─▶ dialect.respond or dialect.stream ─▶ HTTP body
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentsgym.types import FinishReason, Message, ToolCall


class CallError(Exception):
    """A call that is rejected.

    Attributes:
        message: The reason, as a sentence for the author of the program.
        status: The HTTP status.
        param: The part of the body that is wrong; None if it is not a single part.
        code: A name of the reason that programs compare with, such as ``"context_length_exceeded"``; None without.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """What a program requests.

    Attributes:
        model: The model's name, which is returned unchanged.
        messages: The conversation; empty if there is a ``prompt``.
        prompt: The text or the token ids that a text completion continues; None for a conversation.
        tools: JSON schemas of the tools in OpenAI's form, ``{"type": "function", "function": {…}}``.
        max_new_tokens: The token budget; None for no limit of the program's own.
        stop: Texts that end the answer.
        n: Number of answers.
        streams: Whether the answer is sent as server-sent events.
        logprobs: Whether log-probabilities of the sampled tokens are returned.
        token_ids: Whether the exact tokens are returned.
        include_usage: Whether a stream ends with the number of tokens.
        extra: What a dialect must remember from the body to write its response.
    """

    model: str
    messages: Sequence[Message] = ()
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    n: int = 1
    streams: bool = False
    logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the policy.

    Attributes:
        call_id: The identifier by which a reward refers to the call, without a prefix.
        text: The text of the answer, without reasoning and well-formed tool calls.
        reasoning: Reasoning before the answer, where it is separate from the text.
        tool_calls: The well-formed tool calls, each with an ``id``.
        finish_reason: ``"stop"`` or ``"length"``; with tool calls, a dialect writes its own word for them.
        stopped_by: The text of ``stop`` that ended the answer; None if none did.
        prompt_ids: The exact prompt; empty without a tokenizer.
        token_ids: The sampled tokens; empty without a tokenizer.
        token_texts: The text of each sampled token.
        logprobs: The log-probability of each sampled token, NaN where unknown; None if all are.
    """

    call_id: str
    text: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: FinishReason = "stop"
    stopped_by: str | None = None
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    token_texts: Sequence[str] = ()
    logprobs: Sequence[float] | None = None

    @property
    def has_text(self) -> bool:
        """Whether a response contains the text, which is omitted if it is empty and there are tool calls."""
        return bool(self.text) or not self.tool_calls
