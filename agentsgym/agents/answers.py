"""Convert sampled tokens to an action, in the same way for every agent that samples from a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.errors import TemplateError
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, FinishReason, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every id that ends a turn: the template's end-of-turn id, and the end tokens of tokenizer and model.

    Raises:
        TemplateError: The chat template does not allow exact tokens.
    """
    config: Any = model.generation_config
    return as_ids(config.eos_token_id if config else None) | ChatFormat.of(tokenizer, append=False).stop_token_ids


def as_ids(ids: Any) -> frozenset[int]:
    """Return the set of ids in an option that may be one id, several, or None."""
    if ids is None:
        return frozenset()
    return frozenset({ids} if isinstance(ids, int) else ids)


def action_from_ids(  # noqa: PLR0913  # keywords, most of them left out
    request: TurnRequest,
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    *,
    logprobs: Sequence[float] | None = None,
    text_before_stop: Callable[[str], str] | None = None,
    policy_version: int | None = None,
) -> Action:
    """Create an action from sampled ids by decoding their text.

    Args:
        request: The request that the ids answer.
        token_ids: The answer's ids, (T,), with nothing after its end.
        tokenizer: Tokenizer that decodes the text, without the id that ends the answer and without special tokens.
        stop_token_ids: The ids that end an answer; an answer without them was cut off.
        logprobs: The log-probability of each id, (T,), or None.
        text_before_stop: Function that returns the text before the first stop string; an answer with a stop string was
            not cut off.
        policy_version: See :class:`~agentsgym.types.Action`.
    """
    untyped: Any = tokenizer  # transformers declares `decode` only in part
    is_ended = bool(token_ids) and token_ids[-1] in stop_token_ids
    text = str(untyped.decode(list(token_ids[:-1] if is_ended else token_ids), skip_special_tokens=True))
    kept = text if text_before_stop is None else text_before_stop(text)
    finish_reason: FinishReason = "stop" if is_ended or kept != text else "length"
    action = sampled_action(
        request, token_ids, text=kept, finish_reason=finish_reason, logprobs=logprobs, policy_version=policy_version
    )
    return with_calls_of_ids(action, request, token_ids, tokenizer)


def sampled_action(
    request: TurnRequest,
    token_ids: Sequence[int],
    *,
    text: str,
    finish_reason: FinishReason,
    logprobs: Sequence[float] | None = None,
    policy_version: int | None = None,
) -> Action:
    """Create an action from sampled ids and their text; the ids are kept only if the prompt was exact.

    An answer to a prompt that was rendered from messages may not continue the recorded tokens, so it counts as text.
    """
    is_exact = bool(request.token_ids)
    return Action(
        text=text,
        token_ids=token_ids if is_exact else None,
        logprobs=logprobs if is_exact else None,
        agent_state=request.agent_state,
        finish_reason=finish_reason,
        policy_version=policy_version,
    )


def with_calls_of_ids(
    action: Action, request: TurnRequest, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Action:
    """Parse an answer that counts as text from its ids, since decoding loses some templates' markers.

    An answer to an exact prompt keeps its ids, and is parsed when it is recorded.
    """
    untyped: Any = tokenizer
    if request.token_ids or not untyped.chat_template:
        return action
    try:
        chat_format = ChatFormat.of(tokenizer, append=False, tools=request.tools)
    except TemplateError:  # the template is only rendered here
        return action
    with_ids = dataclasses.replace(action, token_ids=token_ids, logprobs=None)
    read = read_answer(with_ids, chat_format, request.tools or None)
    return dataclasses.replace(read, token_ids=None)
