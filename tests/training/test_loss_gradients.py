"""The gradient of the loss as the trainer computes it, in float64: finite differences, and what must not change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trl_interface import (
    ALL_LOSS_TYPES,
    CLIPPED,
    EPSILON,
    Batch,
    only,
    parameter_gradients,
    played,
    prepared,
    token_weight,
)
from torch.overrides import TorchFunctionMode

from agentsgym.training.trainer import GRPOEnvTrainer

STEP = 1e-5
SPLIT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


class DoublePrecision(TorchFunctionMode):
    """Where the model or TRL's head rounds to single precision on the way, they get double."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return function(*args, **kwargs)


def exact(folder: Path, **changes: Any) -> tuple[GRPOEnvTrainer, Batch]:
    """A trainer in the middle of training and a generation batch that it played, both in float64."""
    trainer = prepared(folder, **changes)
    batch = played(trainer)
    forward = trainer.model.double().forward

    def in_double(*args: Any, **kwargs: Any) -> Any:
        with DoublePrecision():
            return forward(*args, **kwargs)

    trainer.model.forward = in_double
    return trainer, {**batch, "advantages": batch["advantages"].double()}


def logps(trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    """Every token's log-probability by a plain forward pass, (B, L); 0.0 in the first column."""
    ids = batch["prompt_completion_ids"]
    logits = trainer.model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
    scored = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([scored.new_zeros(len(ids), 1), scored], dim=1)


def off_policy(trainer: GRPOEnvTrainer, batch: Batch) -> Batch:
    """The batch with ratios inside and outside of the clip on both sides, by column; none near an edge."""
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5]).double()
    columns = ratio.repeat(batch["advantages"].shape[1])[: batch["advantages"].shape[1]]
    with torch.no_grad():
        return {**batch, "old_per_token_logps": logps(trainer, batch) - columns.log()}


def loss(trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    return trainer.compute_loss(trainer.model, batch)


def move(parameters: Sequence[torch.Tensor], direction: Sequence[torch.Tensor], step: float) -> None:
    for one, other in zip(parameters, direction, strict=True):
        one.add_(other, alpha=step)


def assert_is_slope_of(gradients: Sequence[torch.Tensor], trainer: GRPOEnvTrainer, value: Callable[[], Any]) -> None:
    """Gradients times a direction are central differences of ``value`` along it, for a few random directions."""
    parameters = [parameter.data for parameter in trainer.model.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.float64}
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = [torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in parameters]
        values: list[float] = []
        for step in (STEP, -2 * STEP):  # there, and back as far on the other side
            move(parameters, direction, step)
            with torch.no_grad():
                values.append(float(value()))
        move(parameters, direction, STEP)
        slope = (values[0] - values[1]) / (2 * STEP)
        along = sum(float((one * other).sum()) for one, other in zip(gradients, direction, strict=True))
        assert abs(along) > 1e-6
        assert slope == pytest.approx(along, rel=2e-5, abs=1e-9)


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Two gradients are equal but for what TRL's head rounds off on the way back, which is in single precision."""
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) < 1e-6 * float(one.abs().max())


@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_on_policy_it_is_the_slope_of_advantages_times_log_probabilities(loss_type: str, tmp_path: Path) -> None:
    trainer, batch = exact(tmp_path, loss_type=loss_type)
    factor = EPSILON if loss_type == "cispo" else 1.0  # CISPO's weight is the ratio, at most epsilon_high
    weights = (
        factor * batch["advantages"] * batch["agent_token_mask"] * token_weight(loss_type, trainer, batch).double()
    )
    slope = parameter_gradients(trainer, loss(trainer, batch))
    assert_is_slope_of(slope, trainer, lambda: -(weights * logps(trainer, batch)).sum())


@pytest.mark.parametrize("loss_type", [*CLIPPED, "sapo"])
def test_off_policy_it_is_the_slope_of_the_loss_itself(loss_type: str, tmp_path: Path) -> None:
    trainer, on_policy = exact(tmp_path, loss_type=loss_type)
    batch = off_policy(trainer, on_policy)
    slope = parameter_gradients(trainer, loss(trainer, batch))
    assert_is_slope_of(slope, trainer, lambda: loss(trainer, batch))


def test_the_kl_term_has_its_slope_too(tmp_path: Path) -> None:
    trainer, on_policy = exact(tmp_path)
    trainer.beta = 0.3  # the reference is what the batch states
    batch = off_policy(trainer, on_policy)
    noise = torch.randn(batch["advantages"].shape, generator=torch.Generator().manual_seed(2)).double()
    batch["ref_per_token_logps"] = batch["old_per_token_logps"] + 0.3 * noise
    slope = parameter_gradients(trainer, loss(trainer, batch))
    assert_is_slope_of(slope, trainer, lambda: loss(trainer, batch))


def test_a_ratio_of_whole_rows_has_its_slope_where_a_row_has_one_advantage(tmp_path: Path) -> None:
    trainer, on_policy = exact(tmp_path, loss_type="grpo", importance_sampling_level="sequence")
    rows = torch.linspace(-1.5, 2.0, len(on_policy["advantages"])).double()
    batch = off_policy(trainer, {**on_policy, "advantages": rows[:, None] * on_policy["agent_token_mask"]})
    slope = parameter_gradients(trainer, loss(trainer, batch))
    assert_is_slope_of(slope, trainer, lambda: loss(trainer, batch))


@pytest.mark.parametrize("loss_type", ALL_LOSS_TYPES)
def test_the_order_of_the_rows_does_not_matter(loss_type: str, tmp_path: Path) -> None:
    trainer, on_policy = exact(tmp_path, loss_type=loss_type)
    batch = off_policy(trainer, on_policy)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    ours, theirs = (loss(trainer, one) for one in (batch, only(batch, order)))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    assert_equal(parameter_gradients(trainer, ours), parameter_gradients(trainer, theirs))


def whole_and_in_parts(folder: Path, **changes: Any) -> list[list[torch.Tensor]]:
    """The gradient of a generation batch of eight rows at once, and the sum of those of its four micro-batches.

    The last micro-batch has failed rollouts alone, and each is as wide as its own longest row.
    """
    whole, on_policy = exact(folder, **changes)
    batch = off_policy(whole, on_policy)
    parts, _ = exact(folder, **changes, **SPLIT)
    losses = [loss(parts, only(batch, slice(start, start + 2))) for start in range(0, 8, 2)]
    assert [one.item() == 0.0 for one in losses] == [False, False, False, True]
    return [parameter_gradients(whole, loss(whole, batch)), parameter_gradients(parts, sum(losses))]


@pytest.mark.parametrize("loss_type", [one for one in ALL_LOSS_TYPES if one != "bnpo"])
def test_micro_batches_add_up_to_the_batch(loss_type: str, tmp_path: Path) -> None:
    assert_equal(*whole_and_in_parts(tmp_path, loss_type=loss_type))


def test_bnpo_alone_depends_on_how_the_batch_is_split(tmp_path: Path) -> None:
    whole, parts = whole_and_in_parts(tmp_path, loss_type="bnpo")  # a mean over the tokens of each micro-batch
    assert max(float((one - other).abs().max()) for one, other in zip(whole, parts, strict=True)) > 1e-3
