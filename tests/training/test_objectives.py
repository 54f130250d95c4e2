"""What is learned in addition to the advantages has the masks and the weights of the policy's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import has_moved, logged, policy, trainer_of
from test_folded_weights import generated, logps_of, parts
from test_trl_interface import ROWS_WITH_FAILURES, Batch, logp_gradient, prepared

from agentsgym import Distillation, PolicyAgent
from agentsgym.credit.weights import AGGREGATIONS
from agentsgym.training.tensors.scoring import plain_logprobs
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Action, Trajectory, TurnRequest

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
