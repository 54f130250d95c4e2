"""Compute the tokens that rows share at their beginning once: rows packed as a tree, with exact gradients.

::

    rows     P P P a b        packed    P P P a b c d e       one row, (1, N), with each prefix once
             P P P c d e      position  0 1 2 3 4 3 4 5       of each token in its rows

A tree consists of segments: tokens between two branches. Every layer but attention processes one row of distinct
tokens. Attention runs once per segment: its queries attend to the tokens on the path to it and, causally, to its own.
On a GPU, one call for all segments does the same, where a trial before training finds the kernel exact.
The tree is also passed under the names that TRL gives it (``tree_kv_index``, …), which other layers may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentsgym.agents.policy.attention import AT_ONCE, EXTENDED, SDPA, extended_sdpa, uses_attention
from agentsgym.agents.policy.model import random_draws
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

MIN_SHARED: Final = 16  # tokens that a branch must save: each costs a call of attention per layer
#: Types of models with which packed rows were compared: tests/with_models/test_shared_prefixes.py.
FAMILIES: Final = frozenset(
    "bitnet cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_text glm glm4 "  # noqa: SIM905
    "glm4_moe gpt2 gpt_neox gpt_oss granite granitemoe hunyuan_v1_dense llama minimax_m2 ministral ministral3 mistral "
    "mixtral olmo olmo2 olmo3 opt phi phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 starcoder2".split()
)
#: Further ones, whose recurrent layers and convolutions the package tree-recurrence lets follow a tree.
RECURRENT: Final = frozenset(
    {"qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe", "bamba", "olmo_hybrid", "nemotron_h", "granitemoehybrid"}
)
#: Families with heads of several sizes, which the trial on a GPU does not cover: it has heads of one size.
_SEVERAL_SIZES: Final = {"deepseek_v2", "deepseek_v3", "gemma4_text"}
_KNOWN: Final = {"transformers", "torch", "peft", "bitsandbytes"}
MAX_FRACTION: Final = 0.9  # of the tokens of a micro-batch, with its padding, beyond which its rows are not packed


class Segments:
    """The tree of some rows.

    Attributes:
        tokens: The distinct tokens.
        positions: The position of each in its rows.
        places: Where the tokens of each row are among them.
        paths: The segments from the root to each segment, which is the last.
        lengths: The number of tokens of each segment; they are laid end to end.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        """Build the tree of rows of token ids."""
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.places: list[list[int]] = [[] for _ in rows]
        self.paths: list[tuple[int, ...]] = []
        self.lengths: list[int] = []
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        if members := [row for row, ids in enumerate(rows) if ids]:
            self._grow(rows, members, 0, ())

    def _grow(self, rows: Sequence[Sequence[int]], alike: list[int], depth: int, path: tuple[int, ...]) -> None:
        """Add what follows the first ``depth`` tokens of some rows, which share these."""
        stop = _end_of_common([rows[row] for row in alike], depth)
        if len(alike) == 1 or (stop - depth) * (len(alike) - 1) >= MIN_SHARED:
            start = len(self.tokens)
            self.tokens += rows[alike[0]][depth:stop]
            self.positions += range(depth, stop)
            self.lengths.append(stop - depth)
            path, depth = (*path, len(self.paths)), stop
            self.paths.append(path)
            for row in alike:
                self.places[row] += range(start, len(self.tokens))
        branches: dict[int, list[int]] = {}  # by the next token; rows without one apart, at negative keys
        for row in alike:
            if len(rows[row]) > depth:
                branches.setdefault(rows[row][stop] if len(rows[row]) > stop else -1 - row, []).append(row)
        for own in branches.values():
            self._grow(rows, own, depth, path)

    def attend(
        self,
        attend: Callable[..., Any],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend within the tree, by a function of transformers: (1, H, N, D) to (1, N, H, E)."""
        queries, keys, values = (states.split(self.lengths, dim=2) for states in (query, key, value))
        found: list[torch.Tensor] = []
        for number, path in enumerate(self.paths):
            seen = [torch.cat([states[one] for one in path], dim=2) for states in (keys, values)]
            mask = self._mask(number, seen[0].shape[2], options.get("sliding_window"), query.device)
            found.append(attend(module, queries[number], *seen, mask, **options)[0])
        return torch.cat(found, dim=1), None

    def _mask(self, number: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return which keys each query of a segment attends to, (1, 1, Q, S); None for a plain causal mask."""
        window, length = window if window is not None and window < num_keys else None, self.lengths[number]
        if window is None and length == num_keys:
            return None
        if (number, window) not in self._masks:
            allowed = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(num_keys - length)
            if window is not None:
                allowed = allowed.triu(num_keys - length - window + 1)
            self._masks[number, window] = allowed[None, None]
        return self._masks[number, window]

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model for the packed row."""
        starts = [0, *accumulate(self.lengths)]
        index = [place for path in self.paths for one in path for place in range(starts[one], starts[one + 1])]
        stops = [0, *accumulate(sum(self.lengths[one] for one in path) for path in self.paths)]
        return {
            "input_ids": torch.tensor([self.tokens], device=device),
            "position_ids": torch.tensor([self.positions], device=device),
            # Any other attention fails on it: layers must not be computed again after the implementation was switched.
            "attention_mask": torch.ones(1, 1, 0, 0, dtype=torch.bool, device=device),
            "tree": self,
            "tree_kv_index": torch.tensor(index, device=device),
            "tree_cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device=device),
            "tree_cu_seqlens_k": torch.tensor(stops, dtype=torch.int32, device=device),
            "tree_max_seqlen_q": max(self.lengths),
            "tree_max_seqlen_k": max(stop - start for start, stop in pairwise(stops)),
        }


def _end_of_common(rows: Sequence[Sequence[int]], depth: int) -> int:
    first, stop = rows[0], min(map(len, rows))
    for other in rows[1:]:
        if first[depth:stop] != other[depth:stop]:
            stop = next(place for place in range(depth, stop) if first[place] != other[place])
    return stop


def rows_of(ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    """Return right-padded rows, (B, L), as lists without padding."""
    lengths: Iterable[int] = attention_mask.sum(1).tolist()
    return [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]


def segments_of(rows: Sequence[Sequence[int]], num_padded: int) -> Segments | None:
    """Return the tree of rows; None if it would save little of the ``num_padded`` tokens, with padding."""
    tree = Segments(rows)
    return tree if tree.tokens and len(tree.tokens) <= MAX_FRACTION * num_padded else None


def num_computed(rows: Sequence[Sequence[int]]) -> int:
    """Count the tokens that a model computes for the rows of a micro-batch, as a tree or padded."""
    num_padded = len(rows) * max(map(len, rows))
    tree = segments_of(rows, num_padded)
    return num_padded if tree is None else len(tree.tokens)


def micro_batches(batch: Mapping[str, Any], size: int, *, shares: bool) -> Sequence[torch.Tensor]:
    """Group rows, as their places, ``size`` at a time, so that few tokens are computed.

    Rows of similar length are grouped, or, if the model ``shares`` prefixes, rows that begin alike, whichever is less.
    """
    by_length = batch["attention_mask"].sum(1).argsort(descending=True, stable=True)
    if not shares:
        return by_length.split(size)
    rows = rows_of(batch["prompt_completion_ids"], batch["attention_mask"])
    by_ids = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=by_length.device)
    groupings: list[Any] = [order.split(size) for order in (by_length, by_ids)]
    return min(groupings, key=lambda all_places: sum(_nums_computed(rows, all_places)))


def most_computed(ids: torch.Tensor, attention_mask: torch.Tensor, size: int) -> int:
    """Count the tokens that a model which shares prefixes computes for the largest of :func:`micro_batches`."""
    batch = {"prompt_completion_ids": ids, "attention_mask": attention_mask}
    return max(_nums_computed(rows_of(ids, attention_mask), micro_batches(batch, size, shares=True)))


def _nums_computed(rows: Sequence[Sequence[int]], groups: Iterable[torch.Tensor]) -> list[int]:
    return [num_computed([rows[place] for place in places.tolist()]) for places in groups]


def can_share(model: Any, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a model, not wrapped by PEFT, is known to compute the same for packed rows.

    All that links its tokens must be attention, or follow the tree: layers with recurrent states or convolutions would
    let one row's tokens into the next, and some families pass a window to attention by the mask alone.

    Args:
        model: The model.
        dtype: The dtype of its matrix products, which is that of its weights or of autocast.
    """
    config, device = model.config, model.device
    at_once = device.type in AT_ONCE
    names = [SDPA] if at_once else [*EXTENDED]
    return (
        (device.type == "cpu" or (at_once and dtype in (torch.bfloat16, torch.float16)))
        and config.model_type in (FAMILIES - _SEVERAL_SIZES if at_once else FAMILIES | RECURRENT)
        and uses_attention(model, *names, *(EXTENDED[name] for name in names))
        and {type(part).__module__.partition(".")[0] for part in model.modules()} <= _KNOWN  # none of the user's own
        and not random_draws(model)  # rows would share them
        and (config.model_type in FAMILIES or _follows_trees(model))
        and not (at_once and _differs_on(device, dtype, config))
    )


def _follows_trees(model: Any) -> bool:
    """Let the recurrent layers of a model follow trees, which the functions that they call are wrapped for."""
    try:
        from tree_recurrence import install  # noqa: PLC0415  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:  # an extra
        return False
    return install(model).mode == "tree"  # pyright: ignore[reportUnknownMemberType]


def _differs_on(device: torch.device, dtype: torch.dtype, config: Any) -> bool:
    """Whether a device's attention to a tree, or its gradient, is not what it is segment by segment on a CPU."""
    heads: int = config.num_attention_heads
    groups: int = getattr(config, "num_key_value_heads", None) or heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    tree = Segments([[*range(40)], [*range(20), *range(60, 90)], [*range(20), *range(60, 80), *range(9)], [1, 2, 3]])
    module: Any = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, count, len(tree.tokens), width, generator=draw) for count in (heads, groups, groups)]
    given = {name: value for name, value in tree.inputs(device).items() if name.startswith("tree")}
    by_segment = partial(tree.attend, ALL_ATTENTION_FUNCTIONS[SDPA])

    def attended(attend: Callable[..., Any], device: Any, dtype: torch.dtype, options: dict[str, Any]) -> torch.Tensor:
        own = [one.to(device, dtype, copy=True).requires_grad_() for one in states]
        output, _ = attend(module, *own, **options)
        gradients = torch.autograd.grad(output.float().square().sum(), own)
        return torch.cat([one.detach().flatten().float().cpu() for one in (output, *gradients)])

    try:
        for window in (None, 8) if getattr(config, "sliding_window", None) else (None,):
            expected = attended(by_segment, "cpu", torch.float32, {"sliding_window": window})
            options = {"attention_mask": None, "sliding_window": window, **given}
            torch.testing.assert_close(attended(extended_sdpa, device, dtype, options), expected, atol=0.1, rtol=0.1)
    except Exception as error:  # noqa: BLE001  # whatever a kernel raises
        text = "shared_prefix='auto' has no effect, since attention to several rows at once failed: %s"
        logger.warning(text, sentence_of(error))
        return True
    return False
