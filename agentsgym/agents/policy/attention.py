"""Grouped-query attention over a long cache, without copies of the cached keys and values.

If query heads share keys and values and there is a mask, transformers' ``sdpa`` copies both for every query head when
several new tokens follow a cache. These copies grow with the context length, even if there are few new tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "agentsgym_grouped_sdpa"
_PLAIN = "sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Concatenate the queries of all heads that share keys and values, and attend with them as one head.

    Args:
        module: The attention layer, with its ``num_key_value_groups``, R.
        query: Queries of all heads, (N, G·R, Q, D).
        key: Keys of each group, (N, G, S, D).
        value: Values of each group, (N, G, S, E).
        attention_mask: Positions that each query may attend to, (N, 1, Q, S); None for a causal mask.
        options: Further arguments of ``sdpa``.

    Returns:
        The attention output, (N, Q, G·R, E), and no weights, as from ``sdpa``. ``sdpa`` itself is used if no copies
        would be saved, or if the attention is not plain grouped-query attention.
    """
    num_rows, num_heads, num_queries, width = query.shape
    num_groups = key.shape[1]
    num_repeats = getattr(module, "num_key_value_groups", 1)
    is_plain = num_heads == num_groups * num_repeats > num_groups and options.get("position_bias") is None
    # The mask is repeated instead of the keys and values; with many queries, it is the larger of the two.
    saves_memory = num_queries <= num_groups * width
    if attention_mask is None or attention_mask.shape[1] > 1 or not is_plain or not saves_memory:
        return ALL_ATTENTION_FUNCTIONS[_PLAIN](module, query, key, value, attention_mask, **options)  # pyright: ignore[reportUnknownVariableType]
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, num_groups, num_repeats * num_queries, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, num_repeats, 1),
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return output.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, grouped_sdpa)  # pyright: ignore[reportUnknownMemberType]
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[_PLAIN])  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def has_grouped_sdpa(model: PreTrainedModel) -> bool:
    """Whether a model, without its adapters, uses grouped-query attention and transformers' own ``sdpa``."""
    unwrapped: Any = model
    if hasattr(unwrapped, "get_base_model"):
        unwrapped = unwrapped.get_base_model()
    config: Any = unwrapped.config
    functions = getattr(sys.modules[type(unwrapped).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    return (
        functions is ALL_ATTENTION_FUNCTIONS  # some models define their own functions
        and not config.sub_configs  # which may each have their own implementation
        and config._attn_implementation == _PLAIN
        and (getattr(config, "num_key_value_heads", None) or sys.maxsize) < getattr(config, "num_attention_heads", 0)
    )


@contextmanager
def grouped_attention(model: Any) -> Generator[None]:
    """Make a model whose attention implementation is ``sdpa`` use :func:`grouped_sdpa` inside the ``with`` block."""
    if model.config._attn_implementation != _PLAIN:  # it may have been changed since it was checked
        yield
        return
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(_PLAIN)
