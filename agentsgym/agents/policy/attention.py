"""Attention by transformers' functions, with two savings that they lack.

- Grouped-query attention runs over a long cache without copies of the cached keys and values. If query heads share keys
  and values and there is a mask, transformers' ``sdpa`` copies both for every query head when several new tokens follow
  a cache. These copies grow with the context length, even if there are few new tokens.
- Rows of a batch that begin alike can be one row of segments, a tree, which attends to its own paths
  (:mod:`agentsgym.training.tensors.shared_prefix`).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentsgym.agents.policy.text_path import without_adapters

SDPA: Final = "sdpa"
#: The name of each implementation of transformers with these savings.
EXTENDED: Final = {SDPA: "agentsgym_sdpa", "eager": "agentsgym_eager"}
AT_ONCE: Final = {"cuda"}  # devices whose kernel attends to all segments of a tree


def extended_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by ``sdpa``, but over a cache with the queries of all heads that share keys and values as one head.

    Args:
        module: The attention layer, with its ``num_key_value_groups``, R.
        query: Queries of all heads, (N, G·R, Q, D).
        key: Keys of each group, (N, G, S, D).
        value: Values of each group, (N, G, S, E).
        attention_mask: Positions that each query may attend to, (N, 1, Q, S); None for a causal mask.
        tree: The segments of packed rows, whose ``attend`` is called instead; None for plain rows.
        options: Further arguments of ``sdpa``.

    Returns:
        The attention output, (N, Q, G·R, E), and no weights, as from ``sdpa``. ``sdpa`` itself is used if no copies
        would be saved, or if the attention is not plain grouped-query attention.
    """
    attend: Any = ALL_ATTENTION_FUNCTIONS[SDPA]
    if tree is not None and query.device.type in AT_ONCE:
        return _attend_at_once(query, key, value, **options), None
    if tree is not None:
        return tree.attend(attend, module, query, key, value, **options)
    num_rows, num_heads, num_queries, width = query.shape
    num_groups, num_columns = key.shape[1:3]
    num_repeats = getattr(module, "num_key_value_groups", 1)
    is_plain = num_heads == num_groups * num_repeats > num_groups and options.get("position_bias") is None
    # The mask is repeated instead of the keys and values; with many queries, it is the larger of the two.
    saves_memory = 1 < num_queries <= num_groups * width and num_queries < num_columns
    if attention_mask is None or attention_mask.shape[1] > 1 or not is_plain or not saves_memory:
        return attend(module, query, key, value, attention_mask, **options)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, num_groups, num_repeats * num_queries, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, num_repeats, 1),
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return output.reshape(num_rows, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


def _attend_at_once(  # noqa: PLR0913  # TRL's names for a tree
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    tree_max_seqlen_q: int,
    tree_max_seqlen_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attend to a tree by one kernel, over gathered keys, in the half precision of the values."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  # absent from older versions

    # With autocast, rotated queries and keys may be float32. What all rows behind a token add to its gradient is summed
    # in float32, too.
    queries, *shared = (states[0].transpose(0, 1) for states in (query, key, value))
    keys, values = (states.float()[tree_kv_index].to(value.dtype) for states in shared)
    sizes = tree_cu_seqlens_q, tree_cu_seqlens_k, tree_max_seqlen_q, tree_max_seqlen_k
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # to the left, and to the right
    options: dict[str, Any] = {"scale": scaling, "window_size": window, "enable_gqa": True}
    output: Any = varlen_attn(queries.to(value.dtype), keys, values, *sizes, **options)
    return output[None]


def extended_eager(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, tree: Any = None, **options: Any
) -> Any:
    """Attend by the function of the model's own file, with its soft cap or sinks; see :func:`extended_sdpa`."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    if tree is None:
        return attend(module, query, key, value, attention_mask, **options)

    def attend_segment(module: Any, query: Any, key: Any, value: Any, allowed: Any, **options: Any) -> Any:
        if allowed is None:
            allowed = query.new_ones(1, 1, query.shape[2], query.shape[2], dtype=torch.bool).tril()
        mask = query.new_zeros(allowed.shape).masked_fill(~allowed, torch.finfo(query.dtype).min)
        return attend(module, query, key, value, mask, **options)

    return tree.attend(attend_segment, module, query, key, value, **options)


for _name, _function in ((SDPA, extended_sdpa), ("eager", extended_eager)):
    AttentionInterface.register(EXTENDED[_name], _function)  # pyright: ignore[reportUnknownMemberType]
    AttentionMaskInterface.register(EXTENDED[_name], ALL_MASK_ATTENTION_FUNCTIONS[_name])  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether a model uses ``sdpa``, and its code never checks which implementation is set.

    The sparse attention of GLM 5 and DeepSeek V3.2, for example, is dense under any name but ``sdpa`` and ``eager``.
    """
    return uses_attention(model, SDPA, EXTENDED[SDPA]) and not _reads_name(_module_of(model))


def uses_attention(model: PreTrainedModel, *implementations: str) -> bool:
    """Whether all layers of a model, without its adapters, use one of these implementations of transformers' own."""
    config: Any = without_adapters(model).config
    functions = getattr(sys.modules[_module_of(model)], "ALL_ATTENTION_FUNCTIONS", None)
    return (
        functions is ALL_ATTENTION_FUNCTIONS  # some models define their own functions
        and not config.sub_configs  # which may each have their own implementation
        and config._attn_implementation in implementations
    )


def _module_of(model: Any) -> str:
    modules = (one.__module__ for one in type(without_adapters(model)).__mro__)
    return next(one for one in modules if not one.startswith("torch."))  # FSDP2 derives a class from the model's


@functools.cache
def _reads_name(module: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # a package without sources
        return True
    return re.search(r"_attn_implementation (==|!=|in|not in) ", source) is not None


@contextmanager
def grouped_attention(model: Any) -> Generator[None]:
    """Make a model that :func:`has_plain_attention` use :func:`extended_sdpa` inside the ``with`` block."""
    config = model.config
    if config._attn_implementation != SDPA:  # in training, or in another thread
        yield
        return
    config._attn_implementation = EXTENDED[SDPA]  # without model.set_attn_implementation's walk over all modules
    try:
        yield
    finally:
        config._attn_implementation = SDPA
