"""What corrects for the sampler: TRL's own ratios number by number, and the same loss when folded into advantages."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from games import GuessNumber, correcting, logged, policy, settings, tasks, trainer_of
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from test_trl_interface import LOSS_TYPES, Batch, parameter_gradients, played, prepared
from trl import GRPOConfig, GRPOTrainer

from agentsgym import GRPOEnvTrainer
from agentsgym.training._trl import TRLInterface
from agentsgym.training.tensors.importance import (
    CORRECTIONS,
    ImportanceCorrection,
    cut_tokens,
    effective_sample_size,
    importance_sampling_ratio,
    row_log_ratios,
)

TRL_MODES = [mode for mode in CORRECTIONS if mode != "geometric_mask"]


def correction(mode: str, low: float | None, high: float | None) -> ImportanceCorrection:
    return ImportanceCorrection(mode=mode, clip_min=low, clip_max=high)


@cache
def trl_lines() -> Any:
    """The very lines of TRL's trainer that compute the ratio."""
    method = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    blocks: list[ast.stmt] = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "vllm_importance_sampling_ratio = torch.exp" in ast.unparse(node)
    ]
    assert len(blocks) == 1
    return compile(ast.Module(blocks, []), "<trl>", "exec")


def trl_ratio(old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, mode: str, *clips: Any) -> torch.Tensor:
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=clips[0],
        vllm_importance_sampling_clip_max=clips[1],
    )
    values: dict[str, Any] = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
    }
    exec(trl_lines(), values)
    return values["vllm_importance_sampling_ratio"]


def drawn(data: st.DataObject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of model and sampler, some of the latter unknown, and a mask that leaves some rows empty."""
    shape = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    old, sampling = -3 * torch.rand(2, *shape, generator=generator)
    sampling = sampling.masked_fill(torch.rand(shape, generator=generator) < 0.2, math.nan)
    mask = (torch.rand(shape, generator=generator) < 0.6).long()
    return old, sampling, mask * (torch.rand(shape[0], 1, generator=generator) < 0.8)


def by_hand(old: Any, sampling: Any, mask: Any, mode: str) -> list[list[float]]:
    """The ratio of every token before anything is cut, in a loop."""
    ratios: list[list[float]] = []
    for row_old, row_sampling, row_mask in zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True):
        differences = [
            0.0 if not one or math.isnan(q) else p - q
            for p, q, one in zip(row_old, row_sampling, row_mask, strict=True)
        ]
        total = sum(differences)
        if mode.startswith("token"):
            ratios.append([math.exp(difference) for difference in differences])
        elif mode.startswith("sequence"):
            ratios.append([math.exp(total)] * len(differences))
        else:
            ratios.append([math.exp(total / max(1, sum(row_mask)))] * len(differences))
    return ratios


@pytest.mark.parametrize("mode", TRL_MODES)
@given(data=st.data())
def test_the_ratio_is_trls(mode: str, data: st.DataObject) -> None:
    old, sampling, mask = drawn(data)
    clip_min = data.draw(st.none() | st.floats(0.1, 0.9))
    clip_max = data.draw(st.floats(1.0, 4.0) if clip_min is None else st.none() | st.floats(1.0, 4.0))
    ratio = importance_sampling_ratio(old, sampling, mask, correction(mode, clip_min, clip_max))
    assert ratio.shape == mask.shape
    assert torch.equal(ratio, trl_ratio(old, sampling, mask, mode, clip_min, clip_max).expand(mask.shape))


@pytest.mark.parametrize("mode", CORRECTIONS)
@given(data=st.data())
def test_weights_and_cuts_are_those_of_a_loop(mode: str, data: st.DataObject) -> None:
    old, sampling, mask = drawn(data)
    # Halfway between floats of a coarse grid, so that no ratio lies on a bound.
    low, high = (
        data.draw(st.none() | st.integers(*edges).map(lambda n: (n + 0.5) / 97)) for edges in ((9, 96), (97, 300))
    )
    weights = importance_sampling_ratio(old, sampling, mask, correction(mode, low, high))
    cut = cut_tokens(old, sampling, mask, correction(mode, low, high))
    assert weights.shape == cut.shape == mask.shape
    ratios = by_hand(old, sampling, mask, mode)
    lower, upper = 0.0 if low is None else low, math.inf if high is None else high
    for b, row in enumerate(ratios):
        for t, ratio in enumerate(row):
            is_within = lower <= ratio <= upper
            if mode.endswith("truncate"):
                expected = min(max(ratio, lower), upper)
            elif mode == "geometric_mask":
                expected = float(is_within)
            else:
                expected = ratio if is_within else 0.0
            assert weights[b, t].item() == pytest.approx(expected, rel=1e-5)
            assert cut[b, t].item() == (bool(mask[b, t]) and not is_within)


def test_the_ratio_by_hand() -> None:
    sampling = torch.tensor([[-1.0, math.nan, -1.0, -2.0]])
    old = sampling + torch.log(torch.tensor([[2.0, 9.0, 7.0, 8.0]]))
    mask = torch.tensor([[1, 1, 0, 1]])
    ratios = {mode: importance_sampling_ratio(old, sampling, mask, correction(mode, None, 3.0)) for mode in CORRECTIONS}
    torch.testing.assert_close(ratios["token_truncate"], torch.tensor([[2.0, 1.0, 1.0, 3.0]]))
    torch.testing.assert_close(ratios["token_mask"], torch.tensor([[2.0, 1.0, 1.0, 0.0]]))
    torch.testing.assert_close(ratios["sequence_truncate"], torch.tensor([[3.0] * 4]))
    torch.testing.assert_close(ratios["sequence_mask"], torch.tensor([[0.0] * 4]))
    torch.testing.assert_close(ratios["geometric_mask"], torch.ones(1, 4))  # the cube root of 2·1·8 is 2.52
    assert cut_tokens(old, sampling, mask, correction("token_mask", None, 3.0)).tolist() == [
        [False, False, False, True]
    ]
    assert cut_tokens(old, sampling, mask, correction("geometric_mask", None, 2.5)).tolist() == [
        [True, True, False, True]
    ]


def test_what_lies_on_a_bound_is_not_cut() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
    for mode in CORRECTIONS:
        assert not cut_tokens(zeros, zeros, mask, correction(mode, None, 1.0)).any()
        assert (importance_sampling_ratio(zeros, zeros, mask, correction(mode, 1.0, 1.0)) == 1).all()


def test_the_usual_bounds_hold_the_sampler_that_is_the_model() -> None:
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
    for mode, bounds in CORRECTIONS.items():
        assert (importance_sampling_ratio(zeros, zeros, mask, correction(mode, *bounds)) == 1).all()


@pytest.mark.parametrize("low", [None, 0.9])
@pytest.mark.parametrize("high", [None, 1.2])
def test_under_vllm_the_geometric_mean_has_bounds_of_its_own_each_replaced_alone(
    low: float | None, high: float | None, tmp_path: Path
) -> None:
    names = "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
    chosen = {name: bound for name, bound in zip(names, (low, high), strict=True) if bound is not None}
    args = settings(tmp_path, use_vllm=True, vllm_importance_sampling_mode="geometric_mask", **chosen)
    assert args.importance_correction == correction("geometric_mask", low or 0.99, high or 1.01)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_sampler_other_than_vllm_is_corrected_in_trls_words_within_the_bounds_of_the_mode(
    mode: str, tmp_path: Path
) -> None:
    assert settings(tmp_path).importance_correction is None
    assert settings(tmp_path, **correcting(mode)).importance_correction == correction(mode, *CORRECTIONS[mode])


@pytest.mark.parametrize("mode", TRL_MODES)
def test_under_vllm_the_bounds_of_trls_modes_are_trls(mode: str, tmp_path: Path) -> None:
    args = settings(tmp_path, use_vllm=True, vllm_importance_sampling_mode=mode)
    given = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    bounds = given.vllm_importance_sampling_clip_min, given.vllm_importance_sampling_clip_max
    assert args.importance_correction == correction(mode, *bounds)


def test_the_old_name_of_the_upper_bound_is_still_read(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        args = settings(tmp_path, use_vllm=True, vllm_importance_sampling_cap=4.0)
    assert args.importance_correction == correction("token_truncate", None, 4.0)


def test_an_infinite_bound_is_none(tmp_path: Path) -> None:
    found = settings(tmp_path, **correcting("token_truncate", high=math.inf)).importance_correction
    assert found is not None
    zeros, mask = torch.zeros(1, 1), torch.ones(1, 1)
    assert importance_sampling_ratio(zeros + 9, zeros, mask, found).item() == pytest.approx(math.exp(9))


def test_a_long_row_spares_the_mean_and_not_the_product() -> None:
    difference = 0.05 * torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)) + 0.002
    zeros, mask = torch.zeros(1, 4000), torch.ones(1, 4000)
    weights = {
        mode: importance_sampling_ratio(difference, zeros, mask, correction(mode, *CORRECTIONS[mode]))
        for mode in CORRECTIONS
    }
    assert (weights["sequence_mask"] == 0).all()
    assert (weights["geometric_mask"] == 1).all()
    torch.testing.assert_close(weights["token_truncate"], difference.exp())


@pytest.mark.parametrize("disable_dropout", [False, True])
def test_dropout_is_no_gap_between_the_sampler_and_the_model(
    disable_dropout: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    changes = {**correcting("geometric_mask"), "peft_config": adapter, "disable_dropout": disable_dropout}
    trainer = trainer_of(tmp_path, max_steps=1, **changes)
    assert ("the policy has dropout or jitter" in caplog.text) != disable_dropout
    trainer.train()
    assert logged(trainer, "sampling/cut_fraction") == [0.0]


@pytest.mark.parametrize("name", ["attention_dropout", "jitter_noise"])
@pytest.mark.parametrize("disable_dropout", [False, True])
def test_dropout_that_is_no_module_is_seen_and_turned_off(
    disable_dropout: bool, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = policy()
    attention = model.model.layers[0].self_attn
    setattr(attention, name, 0.5)
    args = settings(tmp_path, disable_dropout=disable_dropout)
    GRPOEnvTrainer(model, GuessNumber(tokenizer), args, tasks())
    assert ("the policy has dropout or jitter" in caplog.text) != disable_dropout
    assert getattr(attention, name) == (0.0 if disable_dropout else 0.5)


@given(data=st.data())
def test_row_log_ratios_are_sums_over_agent_tokens(data: st.DataObject) -> None:
    old, sampling, mask = drawn(data)
    ratios = by_hand(old, sampling, mask, "sequence_mask")
    expected = [math.log(row[0]) for row, own in zip(ratios, mask, strict=True) if own.any()]
    assert row_log_ratios(old - sampling, mask) == pytest.approx(expected, abs=1e-5)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=20), st.floats(-1e4, 1e4))
def test_effective_sample_size_is_its_formula_wherever_the_weights_lie(log_ratios: list[float], shift: float) -> None:
    weights = [math.exp(number) for number in log_ratios]
    expected = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
    fraction = effective_sample_size(log_ratios)
    assert fraction == pytest.approx(expected)
    assert 1 / len(weights) - 1e-12 <= fraction <= 1 + 1e-12
    assert effective_sample_size([number + shift for number in log_ratios]) == pytest.approx(fraction, rel=1e-6)


def test_effective_sample_size_at_its_ends() -> None:
    assert effective_sample_size([]) == 1.0
    assert effective_sample_size(row_log_ratios(torch.ones(2, 3), torch.zeros(2, 3))) == 1.0
    assert effective_sample_size([3.0] * 7) == pytest.approx(1.0)
    assert effective_sample_size([800.0, *[0.0] * 7]) == pytest.approx(1 / 8)


def test_effective_sample_size_falls_exponentially_with_length() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 0.05 * torch.randn(4000, 300, generator=generator)  # each token's ratio is off by about 5 %
    mask = torch.ones(noise.shape)
    for length in (50, 300):
        fraction = effective_sample_size(row_log_ratios(noise[:, :length], mask[:, :length]))
        assert fraction == pytest.approx(math.exp(-length * 0.05**2), rel=0.1)  # normal log-ratios: exp(-T·σ²)


def off_policy(trainer: GRPOEnvTrainer) -> Batch:
    """A batch with old log-probabilities that put ratios inside the clip and outside on both sides, in every row."""
    batch = played(trainer)
    mask = batch["agent_token_mask"]
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5, 3.0]).repeat(mask.shape[1])[: mask.shape[1]].expand(mask.shape)
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    batch["old_per_token_logps"] = TRLInterface(trainer).score(*scored)[0] - ratio.log()
    is_outside = (ratio < 0.8) | (ratio > 1.2)
    for is_positive in (batch["advantages"] > 0, batch["advantages"] < 0):
        assert (is_positive & is_outside & (mask == 1)).any()
        assert (is_positive & ~is_outside & (mask == 1)).any()
    return batch


def some_weights(batch: Batch) -> torch.Tensor:
    """One of four weights for each token, 0 among them."""
    shape = batch["advantages"].shape
    choices = torch.tensor([0.0, 0.3, 1.0, 2.5])
    return choices[torch.randint(4, shape, generator=torch.Generator().manual_seed(2))]


def loss_and_gradients(
    trainer: GRPOEnvTrainer, batch: Batch, **changes: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = trainer.compute_loss(trainer.model, {**batch, **changes})
    return loss.detach(), parameter_gradients(trainer, loss)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_folded_weights_weigh_the_loss_of_each_token_and_the_kl_of_none(loss_type: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type, delta=2.0)
    batch = off_policy(trainer)
    trainer.beta = 0.1
    batch["ref_per_token_logps"] = batch["old_per_token_logps"] - 0.5
    weights, advantages = some_weights(batch), batch["advantages"]
    # Without advantages the KL alone is left; with those of some tokens, it and the loss of those tokens.
    kl, kl_gradients = loss_and_gradients(trainer, batch, advantages=0 * advantages)
    expected, expected_gradients = kl, kl_gradients
    for weight in weights.unique():
        chosen = advantages * (weights == weight)
        part, part_gradients = loss_and_gradients(trainer, batch, advantages=chosen)
        expected = expected + weight * (part - kl)
        expected_gradients = [
            whole + weight * (own - rest)
            for whole, own, rest in zip(expected_gradients, part_gradients, kl_gradients, strict=True)
        ]
    loss, gradients = loss_and_gradients(trainer, batch, advantages=weights * advantages)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert kl > 0
    unweighted, _ = loss_and_gradients(trainer, batch)
    assert not torch.isclose(unweighted, expected)


@pytest.mark.parametrize("loss_type", [loss_type for loss_type in LOSS_TYPES if loss_type != "vespo"])
def test_folded_corrections_are_trls_weighted_loss(loss_type: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type)
    batch = off_policy(trainer)
    old, mask = batch["old_per_token_logps"], batch["agent_token_mask"]
    noise = 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(3))
    weights = importance_sampling_ratio(old, old - noise, mask, correction("token_mask", 0.8, 1.2))
    assert {0.0, 1.0} <= set(weights[mask == 1].sign().tolist())
    ours, our_gradients = loss_and_gradients(trainer, batch, advantages=weights * batch["advantages"])
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    theirs, their_gradients = loss_and_gradients(trainer, batch, importance_sampling_ratio=weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
