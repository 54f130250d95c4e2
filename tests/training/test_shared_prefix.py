"""What rows of a micro-batch share at their beginning is computed once, and no number knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import BOUND, ROUNDING, branching_rows, packed
from games import RECOMPUTED, demonstrated, policy, settings, trainer_of, weights
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_turn_layout import newest, rewriting
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from zoo import build

from agentsgym import ConfigError
from agentsgym.agents.policy.attention import EXTENDED
from agentsgym.training.tensors import shared_prefix
from agentsgym.training.tensors.shared_prefix import FAMILIES, Segments, can_share, micro_batches, segments_of

IMPORTED = EXTENDED  # the implementations are registered where they are defined
VOCABULARY = 100


@st.composite
def tries(draw: st.DrawFn) -> list[list[int]]:
    """Rows that begin as others do, up to anywhere, and may end there; some are empty."""
    rows: list[list[int]] = [[]]
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.sampled_from(rows))
        tail = draw(st.lists(st.integers(0, 2), max_size=12))
        rows.append(start[: draw(st.integers(0, len(start)))] + tail)
    return rows


@given(tries(), st.sampled_from([1, 4, 16]))
def test_a_tree_spells_its_rows_and_saves_what_it_can(rows: list[list[int]], min_shared: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SHARED", min_shared)
        tree = Segments(rows)
    for row, places in zip(rows, tree.places, strict=True):
        assert [tree.tokens[place] for place in places] == row
        assert [tree.positions[place] for place in places] == [*range(len(row))]
    if not tree.tokens:
        assert not any(rows)
        return
    inputs = tree.inputs(torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [tree.tokens]
    assert inputs["position_ids"].tolist() == [tree.positions]
    index, queries, keys = (
        inputs[f"tree_{name}"].tolist() for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")
    )
    seen = [index[start:stop] for start, stop in zip(keys, keys[1:], strict=False)]
    for own, start, stop in zip(seen, queries, queries[1:], strict=False):
        assert own[start - stop :] == [*range(start, stop)]  # its own tokens, after all that precede them
        assert [tree.positions[place] for place in own] == [*range(len(own))]
        num_rows = sum(places[: len(own)] == own for places in tree.places)
        assert num_rows == 1 or (num_rows - 1) * (stop - start) >= min_shared
    assert all(places in seen for places in tree.places if places)
    assert (inputs["tree_max_seqlen_q"], inputs["tree_max_seqlen_k"]) == (max(tree.lengths), max(map(len, rows)))
    if min_shared == 1:
        assert len(tree.tokens) == len({tuple(row[: stop + 1]) for row in rows for stop in range(len(row))})


def test_a_few_tokens_that_all_rows_share_do_not_hide_what_some_of_them_share() -> None:
    rows = [[1, task, *[5] * 40, own] for task in (2, 3) for own in (6, 7)]
    assert Segments(rows).lengths == [42, 1, 1, 42, 1, 1]


def gpt2() -> Any:
    """A model that computes in float64 throughout, and knows a token's position by a weight."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_draws: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_draws, initializer_range=0.3)).double()


@tried(max_examples=25)
@given(tries())
def test_the_gradient_is_that_of_each_row_alone(rows: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SHARED", 1)
        if any(len(row) > 1 for row in rows):
            assert max(packed(gpt2(), rows)) < 1e-9


@pytest.mark.parametrize("recomputes", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("adapts", [False, True])
def test_it_is_so_with_adapters_and_recomputed_activations(adapts: bool, recomputes: dict[str, bool] | None) -> None:
    model = gpt2()
    if adapts:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    if recomputes is not None:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputes)
        model.enable_input_require_grads()
    assert max(packed(model.double(), branching_rows(VOCABULARY))) < 1e-9


@pytest.mark.parametrize("family", ["llama", "mistral window of 32", "gemma2"])
def test_families_are_exact(family: str) -> None:
    """``make test-models`` shows it of all of them; the window is shorter than the rows, Gemma 2 caps its scores."""
    rows = branching_rows(VOCABULARY)
    assert max(packed(build(family), rows)) < BOUND
    assert max(packed(build(family).double(), rows)) < ROUNDING
