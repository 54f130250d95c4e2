"""The gradient of the loss, in float64: finite differences, and what is learned in addition to the advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import has_moved, logged, policy, trainer_of
from test_folded_weights import generated, logps_of, parts
from test_trl_interface import (
    ALL_LOSS_TYPES,
    CLIPPED,
    EPSILON,
    ROWS_WITH_FAILURES,
    Batch,
    logp_gradient,
    only,
    parameter_gradients,
    played,
    prepared,
    token_weight,
)
from torch.overrides import TorchFunctionMode

from agentsgym import Action, Distillation, GRPOEnvTrainer, PolicyAgent, Trajectory, TurnRequest
from agentsgym.credit.weights import AGGREGATIONS
from agentsgym.training.tensors.scoring import plain_logprobs

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


NEVER_WON = [{"task_data": {**row["task_data"], "secret": -1}} for row in ROWS_WITH_FAILURES]  # no advantages
TEACHER, _ = policy(seed=5)
WEIGHT = 0.5


def taught(folder: Path, **changes: Any) -> tuple[GRPOEnvTrainer, Batch, list[Trajectory]]:
    """A trainer whose only signal is a teacher, and a generation batch with its rollouts."""
    teacher = Distillation(teacher=TEACHER, weight=WEIGHT)
    trainer = prepared(folder, distillation=teacher, advantage_estimator="grpo", **changes)
    return trainer, *generated(trainer, NEVER_WON)


def gaps(trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    """The teacher's log-probabilities minus the policy's, by plain forward passes, (B, L)."""
    columns = batch["prompt_completion_ids"], batch["attention_mask"], batch["agent_token_mask"]
    return plain_logprobs(TEACHER, *columns) - plain_logprobs(trainer.model, *columns)


def in_invalid_turns(rollouts: Sequence[Trajectory], batch: Batch, mode: str) -> torch.Tensor:
    """Whether a token, or the turn that it answers, is excluded by ``invalid_turns``, (B, L)."""
    found = torch.zeros(batch["agent_token_mask"].shape).bool()
    for row, rollout in enumerate(rollouts):
        stops = [*(turn.start for turn in rollout.turns[1:]), found.shape[1]]
        for turn, stop in zip(rollout.turns, stops, strict=True):
            found[row, turn.start : stop] = turn.invalid
        if mode == "mask_rollout":
            found[row] = any(turn.invalid for turn in rollout.turns)
    return found


@pytest.mark.parametrize("mode", ["mask", "mask_rollout"])
def test_excluded_turns_learn_nothing_from_a_teacher(mode: str, tmp_path: Path) -> None:
    trainer, batch, rollouts = taught(tmp_path, invalid_turns=mode, max_turn_tokens=8)
    excluded, mask = in_invalid_turns(rollouts, batch, mode), batch["agent_token_mask"].bool()
    assert (mask & excluded).any()
    assert (mask & ~excluded).any()
    gradient = logp_gradient(trainer, batch)
    assert not gradient[excluded].any()
    expected = -WEIGHT * gaps(trainer, batch) / mask.sum()
    torch.testing.assert_close(gradient, expected.masked_fill(excluded, 0.0), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_teacher_has_the_aggregation_of_the_loss(aggregation: str, tmp_path: Path) -> None:
    trainer, batch, _ = taught(tmp_path, loss_aggregation=aggregation)
    expected = -WEIGHT * parts(batch, aggregation) * gaps(trainer, batch)
    torch.testing.assert_close(logp_gradient(trainer, batch), expected, rtol=1e-3, atol=1e-7)


class Forgetful(PolicyAgent):
    """Does not know how likely the first token was after the answer "Higher."."""

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        actions = zip(requests, super().act(requests), strict=True)
        return [
            replace(action, logprobs=[math.nan, *(action.logprobs or ())[1:]])
            if request.messages[-1]["content"] == "Higher."
            else action
            for request, action in actions
        ]


def test_an_unknown_log_probability_in_an_excluded_rollout_does_not_stop_a_run(tmp_path: Path) -> None:
    agent = Forgetful(*policy(), max_turn_tokens=4)
    secrets = Dataset.from_list([{"task_data": {"seed": n, "secret": 6 * (n % 2)}} for n in range(8)])
    changes: dict[str, Any] = {"agent": agent, "truncated_rollouts": "mask", "max_steps": 3}
    teacher = Distillation(teacher=TEACHER)
    with trainer_of(tmp_path, dataset=secrets, distillation=teacher, **changes) as trainer:
        batch, rollouts = generated(trainer, [{"task_data": {"secret": 6 * (n // 4)}} for n in range(8)])
        unknown = [math.isnan(sum(one.logprobs or ())) for one in rollouts]
        assert any(unknown)
        assert not any(mask.any() for mask, one in zip(batch["agent_token_mask"], unknown, strict=True) if one)
        trainer.train()
        assert has_moved(trainer)
    assert all(math.isfinite(value) for value in logged(trainer, "distillation/kl"))


def answers(rollouts: Sequence[Trajectory], batch: Batch) -> Batch:
    """The observations between the turns of rollouts that did not fail, as if they were turns, for ``parts``."""
    turn_index = torch.full(batch["agent_token_mask"].shape, -1)
    for row, rollout in enumerate(rollouts):
        for k, (turn, after) in enumerate(() if rollout.failed else pairwise(rollout.turns)):
            turn_index[row, turn.stop : after.start] = k
    return {"turn_index": turn_index, "agent_token_mask": (turn_index >= 0).long()}


@pytest.mark.parametrize("aggregation", [None, *AGGREGATIONS])
def test_a_loss_on_observations_has_the_aggregation_of_the_loss(aggregation: str | None, tmp_path: Path) -> None:
    trainer = prepared(tmp_path, loss_aggregation=aggregation, observation_loss_weight=0.3)
    batch, rollouts = generated(trainer, ROWS_WITH_FAILURES)
    expected = -0.3 * (parts(answers(rollouts, batch), aggregation or "token") * logps_of(trainer, batch)).sum()
    none = {**batch, "observation_weights": torch.zeros_like(batch["observation_weights"])}
    with torch.no_grad():
        found = trainer.compute_loss(trainer.model, batch) - trainer.compute_loss(trainer.model, none)
    assert expected > 0
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregation", [None, "trajectory"])
@pytest.mark.parametrize("mode", ["mask", "mask_rollout"])
def test_answers_to_excluded_turns_are_not_learned(mode: str, aggregation: str | None, tmp_path: Path) -> None:
    changes = {"loss_aggregation": aggregation, "observation_loss_weight": 0.3, "max_turn_tokens": 8}
    trainer = prepared(tmp_path, invalid_turns=mode, **changes)
    batch, rollouts = generated(trainer, ROWS_WITH_FAILURES)
    every, excluded = answers(rollouts, batch)["agent_token_mask"] > 0, in_invalid_turns(rollouts, batch, mode)
    assert (every & excluded).any()
    assert torch.equal(batch["observation_weights"] > 0, every & ~excluded)
    assert int(batch["num_observation_tokens"]) == int((every & ~excluded).sum()) > 0
    assert batch["observation_weights"].sum().item() == pytest.approx(0.3 * int(batch["num_observation_tokens"]))
