"""What rows of a micro-batch share at their beginning is computed once, and no number knows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import BOUND, ROUNDING, branching_rows, packed
from games import RECOMPUTED, demonstrated, logged, policy, settings, tasks, trainer_of, weights
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_turn_layout import newest, rewriting
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from zoo import build

from agentsgym import ConfigError
from agentsgym.agents.policy import attention
from agentsgym.agents.policy.attention import EXTENDED
from agentsgym.training.loss import regroup_rows
from agentsgym.training.tensors import shared_prefix
from agentsgym.training.tensors.shared_prefix import Segments, can_share, micro_batches, segments_of

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
    index, queries, keys = (inputs[f"tree_{name}"].tolist() for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k"))
    seen = [index[start:stop] for start, stop in pairwise(keys)]
    for own, (start, stop) in zip(seen, pairwise(queries), strict=True):
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
        lora: Any = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
        model = get_peft_model(model, LoraConfig(r=2, **lora)).double()
    if recomputes is not None:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs=recomputes)
        model.enable_input_require_grads()
    assert max(packed(model, branching_rows(VOCABULARY))) < 1e-9


@pytest.mark.parametrize("family", ["llama", "mistral window of 32", "gemma2"])
def test_families_are_exact(family: str) -> None:
    """``make test-models`` shows it of all of them; the window is shorter than the rows, Gemma 2 caps its scores."""
    rows = branching_rows(VOCABULARY)
    assert max(packed(build(family), rows)) < BOUND
    assert max(packed(build(family).double(), rows)) < ROUNDING


ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)}
VALUES = {"advantage_estimator": "turn_gae", "value_head_kwargs": {"learning_rate": 0.1}}
RUNS: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "luspo", "sapo", "vespo")},
    "shared values": {**VALUES, "value_head": "shared"},
    "own values": {**VALUES, "value_head": "separate"},
    "accumulated": ACCUMULATED,
    "iterated by sequence": {"num_iterations": 2, "max_steps": 4, "importance_sampling_level": "sequence"},
    "entropy bonus": {"entropy_coef": 0.1},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "reference": {"beta": 0.1, "by_path": True, "max_steps": 3},
    "adapters": {"beta": 0.1, **LORA, **RECOMPUTED, "max_steps": 3},
    "observed": {"observation_loss_weight": 0.5},
    "imitating": {"demonstrations": demonstrated(4, batch_size=4)},
    "rewritten": {"layout": "turn", "history": "rerender", **ACCUMULATED},
    "rewritten, a window": {"layout": "turn", "history": newest, "loss_type": "grpo", "num_iterations": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tasks(3), "max_steps": 1},
}


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[dict[str, Any], list[int]]:
    """What a run comes to, and the tokens of each packed pass."""
    sizes: list[int] = []
    inputs, own = Segments.inputs, {"optim": "sgd", "learning_rate": 0.1, **changes}
    if own.pop("by_path", False):
        model, tokenizer = policy()
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        own["model"] = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)  # of adapters
    trainer = rewriting(folder, own.pop("history"), **own) if "history" in own else trainer_of(folder, **own)
    with monkeypatch.context() as patch:
        patch.setattr(Segments, "inputs", lambda tree, device: sizes.append(len(tree.tokens)) or inputs(tree, device))
        trainer.train()
    values = [] if trainer.value_model is None else [*trainer.value_model.parameters()]
    seen = {name: logged(trainer, name) for name in ("loss", "grad_norm", "eval_loss", "value_loss", "kl")}
    return {"values": values, **weights(trainer), **seen}, sizes


@pytest.mark.parametrize("name", RUNS)
def test_a_run_comes_to_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, none = trained(tmp_path / "off", monkeypatch, shared_prefix="off", **RUNS[name])
    shared, sizes = trained(tmp_path / "auto", monkeypatch, **RUNS[name])
    assert sizes
    assert not none
    assert any(apart["loss"])
    for key, expected in apart.items():
        torch.testing.assert_close(shared[key], expected, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("num_shared", "is_packed"), [(0, False), (10, False), (18, False), (20, True)])
def test_rows_that_share_little_are_not_packed(num_shared: int, is_packed: bool) -> None:
    rows = [[*range(100)], [*range(num_shared), *range(200, 300 - num_shared)]]
    assert (segments_of(rows, 200) is not None) == is_packed


@pytest.mark.parametrize("shares", [False, True])
def test_rows_that_begin_alike_are_put_together_if_that_saves_more(shares: bool) -> None:
    rows = [[*[task] * 40, *range(num_own)] for num_own in (5, 10) for task in (3, 1)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    batch = {"prompt_completion_ids": ids, "attention_mask": mask}
    expected = [{1, 3}, {0, 2}] if shares else [{2, 3}, {0, 1}]
    assert [{*places.tolist()} for places in micro_batches(batch, 2, shares=shares)] == expected
    strangers = {"prompt_completion_ids": torch.arange(ids.numel()).view_as(ids), "attention_mask": mask}
    assert [{*places.tolist()} for places in micro_batches(strangers, 2, shares=shares)] == [{2, 3}, {0, 1}]


@pytest.mark.parametrize(("changes", "is_regrouped"), [({"entropy_coef": 0.1}, True), ({"loss_type": "bnpo"}, False)])
def test_with_an_entropy_bonus_rows_are_grouped_all_the_same(
    changes: dict[str, Any], is_regrouped: bool, tmp_path: Path
) -> None:
    args = settings(tmp_path, **ACCUMULATED, **changes)
    rows = torch.tensor([[task] * 40 for task in (1, 2, 1, 2, 1, 2, 1, 2)])
    batches = [{"prompt_completion_ids": own, "attention_mask": torch.ones_like(own)} for own in rows.split(4)]
    found = regroup_rows(batches, args, has_aux_loss=False, shares=True)
    assert [len(one["prompt_completion_ids"].unique(dim=0)) for one in found] == ([1, 1] if is_regrouped else [2, 2])
    assert regroup_rows(batches, args, has_aux_loss=False, shares=False) is batches


class OwnForward(LlamaForCausalLM):
    """A model of a listed type that might do anything."""


def with_a_layer_of_its_own() -> Any:
    class Own(torch.nn.Linear):
        """Might link tokens."""

    model = policy()[0]
    model.model.layers[0].mlp = Own(64, 64)
    return model


def with_dropout() -> Any:
    model = policy()[0]
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return model


OTHERS: dict[str, Any] = {
    "recurrent": lambda: build("mamba2"),
    "a window by the mask alone": lambda: build("phimoe"),
    "a window of which attention learns nothing": lambda: build("qwen2_moe"),
    "of one's own": lambda: OwnForward(policy()[0].config),
    "with a layer of one's own": with_a_layer_of_its_own,
    "dropout": with_dropout,
    "another device": lambda: policy()[0].to("meta"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_might_compute_otherwise_is_not_packed(name: str) -> None:
    assert can_share(policy()[0])
    assert not can_share(OTHERS[name]())


def varlen_reference(top_left: bool = False) -> Any:
    """Attention to rows of various lengths by its definition, with the signature of torch's kernel for GPUs."""

    def attend(query: Any, key: Any, value: Any, *sizes: Any, scale: Any, window_size: Any, enable_gqa: bool) -> Any:
        (queries, keys), (left, right) = (one.tolist() for one in sizes[:2]), window_size
        assert (query.dtype, key.dtype) == (value.dtype, value.dtype)
        assert enable_gqa
        assert sizes[2:] == tuple(max(b - a for a, b in pairwise(one)) for one in (queries, keys))
        found: list[torch.Tensor] = []
        for (start, stop), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
            places = torch.arange(stop - start)[:, None] + (0 if top_left else last - first - stop + start)
            distance = torch.arange(last - first) - places
            allowed = (distance <= right) & (distance >= (-left if left >= 0 else -(10**6)))
            own = (query[start:stop], *(one[first:last] for one in (key, value)))
            states = [one.transpose(0, 1)[None].float() for one in own]
            options: Any = {"attn_mask": allowed, "scale": scale, "enable_gqa": True}
            found.append(torch.nn.functional.scaled_dot_product_attention(*states, **options)[0].transpose(0, 1))
        return torch.cat(found).to(value.dtype)

    return attend


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let CPUs attend by one call, as GPUs do, and return what replaces the kernel."""
    monkeypatch.setattr(attention, "AT_ONCE", {"cpu"})
    monkeypatch.setattr(shared_prefix, "AT_ONCE", {"cpu"})
    return lambda kernel: monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "starcoder2", "gpt_neox"])
def test_one_call_for_all_segments_is_used_where_its_kernel_is_exact(family: str, at_once: Any) -> None:
    model = build(family)
    assert not can_share(model, torch.float32)
    at_once(varlen_reference())
    assert can_share(model, torch.bfloat16)
    rows = branching_rows(VOCABULARY)
    model.set_attn_implementation(EXTENDED["sdpa"])
    tree, longest = Segments(rows), max(map(len, rows))
    with torch.no_grad():
        together = model(**tree.inputs(model.device), use_cache=False).logits[0]
        model.set_attn_implementation("sdpa")
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        alone = model(ids, attention_mask=mask, use_cache=False).logits
    for row, places in enumerate(tree.places):
        torch.testing.assert_close(together[places], alone[row, : len(places)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [varlen_reference(top_left=True), lambda *_, **__: 1 / 0, None])
def test_a_kernel_that_is_not_exact_or_fails_is_not_used(kernel: Any, at_once: Any, caplog: Any) -> None:
    if kernel is not None:  # torch's own does not run on a CPU
        at_once(kernel)
    assert not can_share(build("mistral"), torch.bfloat16)
    assert "shared_prefix='auto' has no effect, since attention to several rows at once failed" in caplog.text


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"shared_prefix": "off"}, False),
        ({"neftune_noise_alpha": 5.0}, False),
        ({"model": with_dropout}, False),
        ({"model": with_dropout, "disable_dropout": True}, True),
        ({"model": lambda: build("qwen3_moe"), "router_aux_loss_coef": 0.0}, True),
        ({"model": lambda: build("qwen3_moe"), "router_aux_loss_coef": 0.1}, False),
    ],
)
def test_a_trainer_packs_where_it_may(changes: dict[str, Any], shares: bool, tmp_path: Path) -> None:
    changes = {**changes, "model": changes["model"]()} if "model" in changes else changes
    trainer = trainer_of(tmp_path, **changes)
    assert trainer._trl.shares_prefixes == shares
    assert (trainer.model.config._attn_implementation in EXTENDED.values()) == shares
    trainer.save_model(str(tmp_path / "saved"))
    assert "agentsgym" not in (tmp_path / "saved" / "config.json").read_text(encoding="utf-8")


def test_a_later_trainer_that_does_not_share_packs_nothing(tmp_path: Path) -> None:
    model = policy()[0]
    names = [
        trainer_of(tmp_path, model=model, shared_prefix=value).model.config._attn_implementation
        for value in ("auto", "auto", "off")
    ]
    assert names == [EXTENDED["sdpa"], EXTENDED["sdpa"], "sdpa"]
    separate = trainer_of(tmp_path, model=model, shared_prefix="off", max_steps=1)
    assert trainer_of(tmp_path, model=model).model.packs_rows
    separate.train()
    assert not model.packs_rows


def test_an_unknown_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shared_prefix must be one of 'auto', 'off', got 'oops'"):
        settings(tmp_path, shared_prefix="oops")


@pytest.mark.parametrize("name", EXTENDED)
def test_layers_that_are_computed_again_by_another_attention_fail(name: str) -> None:
    model = gpt2().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.set_attn_implementation(EXTENDED[name])
    logits = model(**Segments(branching_rows(VOCABULARY)).inputs(model.device), use_cache=False).logits
    model.set_attn_implementation(name)
    with pytest.raises(RuntimeError, match="size"):
        logits.sum().backward()
