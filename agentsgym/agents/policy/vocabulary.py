"""Check a model, and compare the rows of its embedding with the ids of a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentsgym.errors import ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_is_model(model: Any, call: str) -> None:
    """Check that an argument is a model; ``call`` is the correct call, as in ``"PolicyAgent(model, tokenizer)"``."""
    if not hasattr(model, "config"):
        given = shown(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise ConfigError(
            f"the first argument must be a model, such as AutoModelForCausalLM.from_pretrained returns: call {call}; "
            f"got {given}"
        )


def shared_vocabulary_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the size of the tokenizer's id range, including unused ids; the model must embed all of them.

    Models often have more rows, padded to a round number (Qwen3: 151,936 for 151,669 ids), which were never trained.

    Args:
        model: A causal language model; its configuration has the number of rows, however they are sharded.
        tokenizer: The tokenizer; all its ids are smaller than the returned number.

    Raises:
        ConfigError: The model has fewer rows than the tokenizer has ids.
        TemplateError: The chat template does not allow exact tokens.
    """
    config: Any = model.config
    num_rows: int = config.get_text_config().vocab_size
    num_ids = ChatFormat.of(tokenizer, append=False).vocabulary_size
    if num_ids > num_rows:
        raise ConfigError(
            f"the model's embedding must have a row for each id of the tokenizer, got {num_rows} rows for {num_ids} "
            f"ids: call model.resize_token_embeddings({num_ids}), or use the model's own tokenizer"
        )
    return num_ids
