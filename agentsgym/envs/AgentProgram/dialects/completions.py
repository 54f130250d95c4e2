"""OpenAI's text completions, ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects.choices import ChoicesDialect, choice_fields
from agentsgym.envs.AgentProgram.dialects.parts import Part, whole_body
from agentsgym.envs.AgentProgram.dialects.shared import UNKNOWN_LOGPROB, Conversations, finite, reject
from agentsgym.fields import is_int, is_list, is_str

_UNSUPPORTED: Final = {"echo": "the program has the prompt already", "suffix": "the policy only continues a text"}


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
