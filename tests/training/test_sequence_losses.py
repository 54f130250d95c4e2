"""Losses that look at whole rows, with an advantage of its own for every turn: GSPO, VESPO, off-policy masks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from games import has_moved, logged, trainer_of
from test_trl_interface import (
    ALL_LOSS_TYPES,
    EPSILON,
    LOSS_TYPES,
    Batch,
    logp_gradient,
    only,
    parameter_gradients,
    played,
    prepared,
    token_weight,
)
from trl import GRPOTrainer

from agentsgym.training._trl import TRLInterface
from agentsgym.training.loss import loss_inputs
from agentsgym.training.trainer import GRPOEnvTrainer

# What the means of the rows' log-ratios are moved by: inside the clip and outside of it on both sides.
SHIFTS = [-0.6, -0.1, 0.0, 0.1, 0.6, 0.4, 0.0, 0.0]
THRESHOLD = 0.05
LEVELS = ["token", "sequence"]


def off_policy(trainer: GRPOEnvTrainer, shifts: list[float] | None = None) -> tuple[Batch, torch.Tensor]:
    """A batch of earlier weights, and by how much each token's log-probability has changed since, (B, L)."""
    batch = played(trainer)
    mask = batch["agent_token_mask"]
    generator = torch.Generator().manual_seed(5)
    log_ratio = 0.3 * torch.randn(mask.shape, generator=generator) + torch.tensor(shifts or SHIFTS)[:, None]
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    batch["old_per_token_logps"] = TRLInterface(trainer).score(*scored)[0] - log_ratio
    batch["sampling_per_token_logps"] = None  # so that the old ones are the sampler's
    return batch, log_ratio * mask


def constant(batch: Batch) -> torch.Tensor:
    """Give all agent tokens of a row the same advantage; returns those, (B,), of both signs."""
    scalars = torch.tensor([1.0, -1.5, 0.5, -0.3, 2.0, -1.0, 0.7, -0.2])[: len(batch["advantages"])]
    batch["advantages"] = scalars[:, None] * batch["agent_token_mask"]
    return scalars


def sequence_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The geometric mean of each row's ratios, (B, 1), row by row."""
    means = [
        row[chosen == 1].mean() if chosen.any() else torch.tensor(0.0)
        for row, chosen in zip(log_ratio, mask, strict=True)
    ]
    return torch.stack(means)[:, None].exp()


def trls_own(
    trainer: GRPOEnvTrainer, batch: Batch, advantages: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> torch.Tensor:
    """The loss of a ``GRPOTrainer`` with one advantage a row, on the columns that ours looks at."""
    mask = batch["agent_token_mask"]
    first, last = int(mask.any(0).nonzero()[0]), int(batch["attention_mask"].sum(1).max())
    inputs = {**loss_inputs(batch, first, last), "advantages": advantages}
    with monkeypatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(trainer, name, value)
        for name in ("get_off_policy_mask", "get_gamma_weights"):
            patch.setattr(trainer, name, getattr(GRPOTrainer, name), raising=False)
        return GRPOTrainer.compute_loss(trainer, trainer.model, inputs)


def factors(loss_type: str, trainer: GRPOEnvTrainer, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """-d loss / d log-probability of a token by its advantage, from each loss's formula, (B, L)."""
    ratio = ratio.expand_as(advantages)
    if loss_type == "cispo":
        return ratio.clamp(max=EPSILON)
    if loss_type == "sapo":  # of sigmoid(t (r - 1)) 4/t
        args = trainer.args
        temperature = torch.where(advantages > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        gate = torch.sigmoid(temperature * (ratio - 1))
        return 4 * gate * (1 - gate) * ratio
    is_clipped = torch.where(advantages > 0, ratio > 1 + EPSILON, ratio < 1 - EPSILON)
    if trainer.args.delta is not None:
        is_clipped = is_clipped | (ratio > trainer.args.delta)
    return ratio * ~is_clipped


@pytest.mark.parametrize(
    ("loss_type", "changes"), [*((loss_type, {}) for loss_type in LOSS_TYPES), ("dapo", {"delta": 1.5})]
)
def test_gspo_weighs_each_token_by_its_own_advantage_and_its_rows_ratio(
    loss_type: str, changes: dict[str, float], tmp_path: Path
) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type, importance_sampling_level="sequence", **changes)
    batch, log_ratio = off_policy(trainer)
    mask, advantages = batch["agent_token_mask"], batch["advantages"]
    ratio = sequence_ratio(log_ratio, mask)
    for is_outside in (ratio < 1 - EPSILON, ratio > 1 + EPSILON, (ratio - 1).abs() < EPSILON):
        for is_signed in (advantages > 0, advantages < 0):
            assert (is_outside & is_signed & (mask == 1)).any()
    expected = -factors(loss_type, trainer, ratio, advantages) * advantages * token_weight(loss_type, trainer, batch)
    torch.testing.assert_close(logp_gradient(trainer, batch), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_gspo_counts_the_tokens_of_clipped_rows(loss_type: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type, importance_sampling_level="sequence")
    batch, log_ratio = off_policy(trainer)
    mask, advantages = batch["agent_token_mask"], batch["advantages"]
    ratio = sequence_ratio(log_ratio, mask)
    clipped = (((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))) & (mask == 1)
    trainer.compute_loss(trainer.model, batch)
    [share] = trainer._metrics["train"]["clip_ratio/region_mean"]
    assert 0 < share < 1
    assert share == pytest.approx((clipped.sum() / mask.sum()).item())


@pytest.mark.parametrize(
    ("loss_type", "steps"),
    [
        *((loss_type, {}) for loss_type in ALL_LOSS_TYPES),
        *((loss_type, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}) for loss_type in ("grpo", "dapo")),
    ],
)
def test_gspo_with_one_advantage_a_row_is_trls_sequence_level(
    loss_type: str, steps: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"per_device_train_batch_size": 4, **steps} if steps else {}
    trainer = prepared(tmp_path, loss_type=loss_type, importance_sampling_level="sequence", **changes)
    assert trainer.importance_sampling_level == "token"  # so that TRL leaves the ratio to us
    batch, _ = off_policy(trainer)
    scalars = constant(batch)
    ours = trainer.compute_loss(trainer.model, batch)
    theirs = trls_own(trainer, batch, scalars, monkeypatch, importance_sampling_level="sequence")
    # The sums run over tokens here and over rows there, so that the last bits may differ.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    gradients = parameter_gradients(trainer, ours), parameter_gradients(trainer, theirs)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0])


def test_gspo_keeps_turns_apart_where_trls_sequence_level_averages_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = prepared(tmp_path, loss_type="grpo", importance_sampling_level="sequence")
    batch, log_ratio = off_policy(trainer, shifts=[0.0] * 8)
    mask = batch["agent_token_mask"]
    assert ((sequence_ratio(log_ratio, mask) - 1).abs() < EPSILON).all()
    by_turn = torch.where(batch["turn_index"] == 0, 1.0, -1.0) * mask
    swapped = {**batch, "advantages": -by_turn}
    batch["advantages"] = by_turn
    ours = logp_gradient(trainer, batch)
    torch.testing.assert_close(logp_gradient(trainer, swapped), -ours)
    several = [row for row in range(8) if batch["turn_index"][row].max() > 0]
    assert several
    for row in several:
        first, later = (ours[row][batch["turn_index"][row] == k] for k in (0, 1))
        assert (first < 0).all()
        assert (later > 0).all()
    # TRL's gives every token of a row one gradient, that of the mean: what was learnt of turns would be lost.
    width = batch["advantages"].shape[1]
    first, last = int(mask.any(0).nonzero()[0]), int(batch["attention_mask"].sum(1).max())
    original, leaves = trainer._get_per_token_logps_and_entropies, []

    def recorded(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        logps, *others = original(*args, **kwargs)
        leaves.append(logps.detach().requires_grad_())
        return leaves[0], *others

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", recorded)
    trls_own(trainer, batch, by_turn[:, first:last], monkeypatch, importance_sampling_level="sequence").backward()
    assert leaves[0].shape[1] == last - first <= width
    for row in several:
        theirs = leaves[0].grad[row][mask[row, first:last] == 1]
        torch.testing.assert_close(theirs, theirs[:1].expand_as(theirs))


@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_gspo_on_policy_is_the_loss_of_tokens(loss_type: str, tmp_path: Path) -> None:
    trainers = [prepared(tmp_path, loss_type=loss_type, importance_sampling_level=level) for level in LEVELS]
    batches = [played(trainer) for trainer in trainers]
    losses = [trainer.compute_loss(trainer.model, batch) for trainer, batch in zip(trainers, batches, strict=True)]
    gradients = [parameter_gradients(trainer, loss) for trainer, loss in zip(trainers, losses, strict=True)]
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))
    # With old log-probabilities that are the current ones the mean of log-ratios is 0 but for rounding.
    batch, trainer = batches[1], trainers[1]
    scored = batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"]
    batch["old_per_token_logps"] = TRLInterface(trainer).score(*scored)[0]
    loss = trainer.compute_loss(trainer.model, batch)
    torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-7)
    for one, other in zip(parameter_gradients(trainer, loss), gradients[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def phi(trainer: GRPOEnvTrainer, log_weight: float, *, is_positive: bool) -> float:
    """VESPO's weight of a row, e^λ·w^k·e^(-λw)."""
    args = trainer.args
    k, rate = (args.vespo_k_pos, args.vespo_lambda_pos) if is_positive else (args.vespo_k_neg, args.vespo_lambda_neg)
    weight = math.exp(log_weight)
    return math.exp(rate) * weight**k * math.exp(-rate * weight)


@pytest.mark.parametrize("level", LEVELS)
def test_vespo_weighs_a_row_by_one_number_and_its_tokens_by_their_own_advantages(level: str, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_type="vespo", importance_sampling_level=level)
    batch, log_ratio = off_policy(trainer, shifts=[-0.1, -0.05, 0.0, 0.02, 0.05, 0.1, 0.0, 0.0])
    mask, advantages = batch["agent_token_mask"], batch["advantages"]
    sums = advantages.sum(1)
    assert (sums[:6] > 0).any()
    assert (sums[:6] < 0).any()
    assert ((advantages * sums[:, None]) < 0).any()  # a token's sign that is not its row's
    weights = torch.tensor(
        [phi(trainer, log_ratio[row].sum().item(), is_positive=bool(sums[row] >= 0)) for row in range(8)]
    )
    assert weights[:6].max() / weights[:6].min() > 1.5
    expected = -weights[:, None] * advantages * token_weight("vespo", trainer, batch)
    torch.testing.assert_close(logp_gradient(trainer, batch), expected, rtol=1e-4, atol=1e-8)
    assert (expected[mask == 0] == 0).all()


@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_constant_rows_are_trls_scalars_bit_for_bit(
    loss_type: str, is_off_policy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = prepared(tmp_path, loss_type=loss_type, off_policy_mask_threshold=THRESHOLD)
    batch, _ = off_policy(trainer)
    if not is_off_policy:
        batch["old_per_token_logps"] = None
    scalars = constant(batch)
    ours = trainer.compute_loss(trainer.model, batch)
    theirs = trls_own(trainer, batch, scalars, monkeypatch)
    assert torch.equal(ours, theirs)
    gradients = parameter_gradients(trainer, ours), parameter_gradients(trainer, theirs)
    assert all(map(torch.equal, *gradients))
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0])


def kept_rows(batch: Batch, divergence: torch.Tensor) -> list[bool]:
    """The rows that the rule of DeepSeek-V3.2 (2512.02556) keeps, one by one."""
    kept = []
    for row in range(len(divergence)):
        chosen = batch["agent_token_mask"][row] == 1
        mean = divergence[row][chosen].mean().item() if chosen.any() else 0.0
        kept.append(batch["advantages"][row][chosen].sum().item() >= 0 or mean <= THRESHOLD)
    return kept


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_sampler_known", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "vespo"])
def test_the_off_policy_mask_takes_whole_rows_by_the_sign_of_their_sum(
    loss_type: str, is_sampler_known: bool, level: str, tmp_path: Path
) -> None:
    changes = {"loss_type": loss_type, "importance_sampling_level": level, "weights": 2}
    trainer = prepared(tmp_path, off_policy_mask_threshold=THRESHOLD, **changes)
    batch, log_ratio = off_policy(trainer)
    mask = batch["agent_token_mask"]
    batch["advantages"] = batch["advantages"] + torch.tensor([-1.0, -1, 1, 1, -1, -1, 0, 0])[:, None] * mask
    divergence = -log_ratio  # of the old log-probabilities from the current ones
    if is_sampler_known:
        lag = torch.tensor([0.0, 0.5, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0])[:, None] * mask
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + lag
        divergence = divergence + lag
    kept = kept_rows(batch, divergence)
    assert {*kept[:6]} == {True, False}
    unmasked = prepared(tmp_path, **changes)
    everything = logp_gradient(unmasked, batch)
    gradient = logp_gradient(trainer, batch)
    assert ((batch["advantages"] > 0) & (mask == 1))[[not keep for keep in kept]].any()  # dropped with its row
    torch.testing.assert_close(gradient, everything * torch.tensor(kept)[:, None], rtol=1e-5, atol=1e-9)
    assert (gradient[torch.tensor(kept)] != 0).any()


@pytest.mark.parametrize(
    ("loss_type", "level"), [*((loss_type, "sequence") for loss_type in ALL_LOSS_TYPES), ("vespo", "token")]
)
def test_a_microbatch_without_agent_tokens_is_a_finite_zero(loss_type: str, level: str, tmp_path: Path) -> None:
    changes = {"loss_type": loss_type, "importance_sampling_level": level}
    trainer = prepared(tmp_path, off_policy_mask_threshold=THRESHOLD, **changes)
    batch, _ = off_policy(trainer)
    loss = trainer.compute_loss(trainer.model, only(batch, slice(6, 8)))
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in parameter_gradients(trainer, loss))


@pytest.mark.parametrize(
    "changes",
    [
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"importance_sampling_level": "sequence", "top_entropy_quantile": 0.5},
        {"loss_type": "vespo"},
        {"off_policy_mask_threshold": 0.01},
    ],
)
def test_they_train(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, num_iterations=2, max_steps=4, **changes)
    trainer.train()
    assert has_moved(trainer)
    assert all(map(math.isfinite, logged(trainer, "loss") + logged(trainer, "grad_norm")))
