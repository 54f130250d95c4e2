"""Find the ids that end an answer: one rule for every agent that samples a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentsgym.tokens.transcript import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Collect every id that ends a turn: the template's end of turn, and what tokenizer and model declare as their end.

    Raises:
        TemplateError: The chat template does not allow exact tokens.
    """
    config: Any = model.generation_config
    return as_ids(config.eos_token_id if config else None) | ChatFormat.of(tokenizer, append=False).stop_token_ids


def as_ids(ids: Any) -> frozenset[int]:
    """List the ids of an option that may be one id, several, or None."""
    if ids is None:
        return frozenset()
    return frozenset({ids} if isinstance(ids, int) else ids)
