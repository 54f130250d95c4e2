"""What a model can process: a tokenizer's ids, and sequences up to a length; and its evaluation mode."""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import AutoTokenizer, ProcessorMixin
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentsgym.errors import AgentError, ConfigError
from agentsgym.texts import shown
from agentsgym.tokens.chat_format import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
_warn_once = functools.lru_cache(logger.warning)


def check_is_model(model: Any, call: str) -> None:
    """Check that an argument is a model; ``call`` is the correct call, as in ``"PolicyAgent(model, tokenizer)"``."""
    if isinstance(model, type) or not hasattr(model, "config"):
        given = shown(model) if isinstance(model, str | type) else f"a {type(model).__name__}"
        raise ConfigError(
            f"the first argument must be a model, such as AutoModelForCausalLM.from_pretrained returns: call {call}; "
            f"got {given}"
        )


def tokenizer_in(processing_class: Any) -> Any:
    """Return the tokenizer of a processor, with its chat template; any other value is returned unchanged."""
    untyped: Any = processing_class
    if not isinstance(processing_class, ProcessorMixin):
        return untyped
    if getattr(untyped, "tokenizer", None) is None:
        raise ConfigError(f"rollouts are text, but the {type(untyped).__name__} has no tokenizer: pass the model's")
    untyped.tokenizer.chat_template = untyped.chat_template or untyped.tokenizer.chat_template
    return untyped.tokenizer


def shared_vocabulary_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Check that a tokenizer is its model's, and return the size of its id range, including unused ids.

    If the model's folder has a tokenizer, it must have the same ids, but tokens may have been added at the end.

    Models often have more rows, padded to a round number (Qwen3: 151,936 for 151,669 ids), which were never trained.

    Args:
        model: A causal language model; its configuration has the number of rows, however they are sharded.
        tokenizer: The tokenizer; all its ids are smaller than the returned number.

    Raises:
        ConfigError: The model has fewer rows than the tokenizer has ids, or its folder's tokenizer has others.
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
    _compare_with_saved(tokenizer, Path(str(getattr(config, "_name_or_path", "") or "")) / "tokenizer.json")
    return num_ids


def _compare_with_saved(tokenizer: Any, file: Path) -> None:
    """Reject other ids than those of the tokenizer in the model's folder, and warn of another chat template."""
    if not file.is_file() or type(tokenizer).__module__.startswith("transformers_modules"):  # code of the model's own
        return
    saved = _saved_tokenizer(file, file.stat().st_mtime_ns)
    own = tokenizer.get_vocab()
    differing = [token for token, number in saved.get_vocab().items() if own.get(token) != number]
    special = [name for name in ("bos_token_id", "eos_token_id") if getattr(saved, name) != getattr(tokenizer, name)]
    if differing or special:
        what = f"the token {shown(differing[0])}" if differing else special[0]
        raise ConfigError(
            f"the tokenizer must be the one that the model has in {file.parent}, but {what} has another id in it: use "
            "that folder's tokenizer, for the environment too"
        )
    if saved.chat_template != tokenizer.chat_template:
        _warn_once("the tokenizer has another chat template than the one in %s", file.parent)


@functools.lru_cache(maxsize=1)
def _saved_tokenizer(file: Path, modified_ns: int) -> Any:  # noqa: ARG001  # part of the cache's key
    loader: Any = AutoTokenizer
    return loader.from_pretrained(file.parent)


@contextmanager
def evaluation_mode(model: Any) -> Generator[None]:
    """Switch a model to evaluation mode, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def random_draws(model: Any) -> list[tuple[Any, str]]:
    """Return the modules that draw at random in training, with the attribute of the probability or the noise."""
    return [
        (part, name)
        for part in model.modules()
        for name, value in part.__dict__.items()
        if ("dropout" in name or name in _NOISE or (name == "p" and isinstance(part, nn.Dropout)))
        and isinstance(value, float)
        and value
    ]


_NOISE = {"jitter_noise", "input_jitter_noise", "moe_jitter_eps"}


def num_positions(model: Any) -> int | None:
    """Return the maximum sequence length of a model, in tokens, from its configuration; None if it has no limit.

    RoPE scaling is taken into account: in many configurations, ``max_position_embeddings`` is the length before it.
    A limit of :func:`fixed_rope_length` is warned about, once.
    """
    config: Any = model.config.get_text_config(decoder=True)
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None or getattr(config, "alibi", False):
        return None
    if (fixed := fixed_rope_length(model)) is not None:
        _warn_once(_FIXED_ROPE, type(model).__name__, fixed)
        return fixed
    if floor := _scale_floor(config):
        _warn_once(_SCALED, type(model).__name__, floor - 1)
        return min(longest, floor - 1)
    scaled = [
        int((one.get("factor") or 1) * (one.get("original_max_position_embeddings") or longest))
        for one in _rope_parameters(config)
        if one.get("rope_type") not in ("llama3", "longrope")  # for these, max_position_embeddings is already scaled
    ]
    return max([longest, *scaled])


_FIXED_ROPE = (
    "conversations with %s end at %d tokens, with max_tokens: the frequencies of its RoPE (LongRoPE or dynamic NTK) "
    "change for all tokens of a longer one, and its record would not be exact. To fix them, give short_factor and "
    "short_mscale of LongRoPE the values of long_factor and long_mscale in config.json, or replace dynamic NTK by yarn"
)


_SCALED = (
    "conversations with %s end at %d tokens, with max_tokens: beyond, it scales attention by the place in the cache, "
    "which other conversations of a batch move, and the record would not be exact. To continue, sample with vLLM"
)


def _scale_floor(config: Any) -> int | None:
    """Return the length from which the model scales queries by their place in the cache; None if it does not."""
    if config.model_type == "inkling_text":
        return config.log_scaling_n_floor
    is_tuned = config.model_type == "llama4_text" and config.attn_temperature_tuning and 0 in config.no_rope_layers
    return config.floor_scale if is_tuned else None


def fixed_rope_length(model: Any) -> int | None:
    """Return the length up to which RoPE's frequencies are fixed; None if they never change.

    The frequencies of LongRoPE and dynamic NTK depend on the longest row of a batch: beyond this length, cached keys
    have other frequencies than in a forward pass over the full row, and a long row changes all others in its batch.
    """
    config: Any = model.config.get_text_config(decoder=True)
    for one in _rope_parameters(config):
        pairs = [(one.get(f"short_{name}"), one.get(f"long_{name}")) for name in ("factor", "mscale")]
        if one.get("rope_type") == "longrope" and any(short != long for short, long in pairs):
            return one["original_max_position_embeddings"]
        if "dynamic" in str(one.get("rope_type")):
            return config.max_position_embeddings
    return None


def warn_of_context(name: str, length: int | None, longest: int | None) -> None:
    """Warn, once, about a context that ends conversations before their own limit."""
    if length and longest and length <= longest:
        text = "%s has a context of %d tokens, where episodes end with max_tokens: max_completion_length=%d allows more"
        _warn_once(text, name, length, longest)


def check_rope_types(config: Any) -> None:
    """Raise :class:`ConfigError` for a configuration whose ``rope_scaling`` is of a type unknown to transformers."""
    text, is_own = config.get_text_config(decoder=True), type(config).__module__.startswith("transformers_modules")
    for kind in (one.get("rope_type") or "default" for one in _rope_parameters(text)):
        if not (kind in ROPE_INIT_FUNCTIONS or hasattr(text, f"_validate_{kind}_rope_parameters") or is_own):
            raise ConfigError(
                f"rope_scaling in config.json has the type {shown(kind)}, which is unknown to this version of "
                f"transformers: it must be one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
            )


def _rope_parameters(config: Any) -> Sequence[Mapping[str, Any]]:
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    by_layer_type: list[Mapping[str, Any]] = [one for one in parameters.values() if isinstance(one, Mapping)]  # Gemma 3
    return by_layer_type or [parameters]


def budget_within(limit: int | None, prompt: Sequence[int], room: int, limit_name: str, remedy: str = "") -> int:
    """Reduce a turn's token budget to what a limit leaves after the prompt.

    Args:
        limit: Maximum number of tokens of a prompt and its answer together; None if there is none, or it is unknown.
        prompt: The ids before the answer.
        room: The turn's budget.
        limit_name: Name of the limit, for the error message, such as ``"the maximum context length of vLLM"``.
        remedy: How to raise the limit, for the error message.
    """
    if limit is None:
        return room
    if len(prompt) < limit:
        return min(room, limit - len(prompt))
    raise AgentError(
        f"a prompt of {len(prompt)} tokens leaves no room for an answer within {limit_name} ({limit} tokens): {remedy}"
        f"set env_config['max_trajectory_tokens'] to at most {limit}, so that episodes end earlier"
    )
