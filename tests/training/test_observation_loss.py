"""The loss on observations: its value and gradient beside the policy's loss, and which tokens it is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, settings, trainer_of
from test_loss_gradients import assert_is_slope_of, exact, logps, loss, off_policy
from test_trl_interface import Batch, parameter_gradients
from test_turn_layout import newest

from agentsgym.errors import ConfigError
from agentsgym.training.objectives.observations import observation_weights
from agentsgym.training.trainer import GRPOEnvTrainer


def without(batch: Batch) -> Batch:
    return {**batch, "observation_weights": torch.zeros_like(batch["observation_weights"])}


def expected(trainer: GRPOEnvTrainer, batch: Batch) -> torch.Tensor:
    weights = batch["observation_weights"].double()
    return -(weights * logps(trainer, batch)).sum() / (weights > 0).sum()


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo"])
def test_the_weighted_mean_over_observations_is_added_to_the_loss(loss_type: str, tmp_path: Path) -> None:
    trainer, batch = exact(tmp_path, loss_type=loss_type, observation_loss_weight=0.3)
    trainer.beta = 0.0
    batch = off_policy(trainer, batch)
    added = expected(trainer, batch)
    assert added > 0
    assert loss(trainer, batch).item() == pytest.approx((loss(trainer, without(batch)) + added).item(), abs=1e-6)


def test_its_gradient_is_its_slope(tmp_path: Path) -> None:
    trainer, batch = exact(tmp_path, observation_loss_weight=0.3)
    batch = {**batch, "advantages": torch.zeros_like(batch["advantages"])}
    slope = parameter_gradients(trainer, loss(trainer, batch))
    assert_is_slope_of(slope, trainer, lambda: expected(trainer, batch))


def test_a_kl_term_and_ratios_ignore_observations_however_unlikely(tmp_path: Path) -> None:
    trainer, batch = exact(tmp_path, observation_loss_weight=0.3)
    trainer.beta = 0.1
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(30)  # log-probabilities far below what exp() can invert in single precision
    old = logps(trainer, batch).detach() * batch["agent_token_mask"]
    batch = {**batch, "ref_per_token_logps": old, "old_per_token_logps": old}
    assert (logps(trainer, batch) * (batch["observation_weights"] > 0)).min().item() < -100
    parts = loss(trainer, without(batch)) + expected(trainer, batch)
    assert loss(trainer, batch).item() == pytest.approx(parts.item(), rel=1e-6)
    assert all(bool(one.isfinite().all()) for one in parameter_gradients(trainer, loss(trainer, batch)))


def test_the_tokens_between_turns_are_weighted_and_no_others(tmp_path: Path) -> None:
    _, batch = exact(tmp_path, observation_loss_weight={"user": 0.25, "tool": 3.0})
    for weights, turns, attention in zip(
        batch["observation_weights"], batch["turn_index"], batch["attention_mask"], strict=True
    ):
        own = [n for n, k in enumerate(turns.tolist()) if k >= 0]
        if not own:  # a failed rollout
            assert not weights.any()
            continue
        between = {*range(own[0], own[-1])} - {*own}
        assert {*weights.nonzero().flatten().tolist()} == between
        assert {*weights[sorted(between)].tolist()} <= {0.25}
        assert int(attention.sum()) == own[-1] + 1
    assert int(batch["num_observation_tokens"]) == int((batch["observation_weights"] > 0).sum()) > 0


def test_roles_without_a_weight_are_left_out(tmp_path: Path) -> None:
    _, batch = exact(tmp_path, observation_loss_weight={"tool": 1.0})
    assert not batch["observation_weights"].any()
    with trainer_of(tmp_path / "run", observation_loss_weight={"tool": 1.0}) as trainer:
        trainer.train()
    assert not logged(trainer, "observation_loss")


def test_prompts_of_rewritten_histories_are_left_out(tmp_path: Path) -> None:
    with trainer_of(tmp_path, env_config={"history": newest}, layout="turn", observation_loss_weight=0.1) as trainer:
        trainer.train()
        env = GuessNumber(policy()[1], {"history": newest})
        played = env.rollout([{"seed": seed} for seed in range(4)], trainer.agent)
    assert all(value > 0 for value in logged(trainer, "observation_loss"))
    assert any(len(one.segments) > 1 for one in played)
    for one in played:
        weights = observation_weights(one, 1.0)
        for part in one.segments:
            mask = one.agent_token_mask[part.start : part.stop]
            first = mask.index(1)
            assert not any(weights[part.start : part.start + first])


def test_a_policy_learns_to_predict_its_environment(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 8, "learning_rate": 3e-2, "advantage_estimator": "grpo"}
    with trainer_of(tmp_path, observation_loss_weight=1.0, **changes) as trainer:
        trainer.train()
    curve = logged(trainer, "observation_loss")
    assert len(curve) == 8
    assert curve[-1] < 0.5 * curve[0]


@pytest.mark.parametrize(
    ("given", "kept"), [("0.5", 0.5), (2, 2.0), ('{"tool": 0.1}', {"tool": 0.1}), (0, None), ({"tool": 0}, None)]
)
def test_it_is_a_number_or_a_number_by_role(given: Any, kept: Any, tmp_path: Path) -> None:
    assert settings(tmp_path, observation_loss_weight=given).observation_loss == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-1, "observation_loss_weight must be a non-negative number, or a dict"),
        ("much", "observation_loss_weight must be a non-negative number, or a dict"),
        (None, "observation_loss_weight must be a non-negative number, or a dict"),
        ({"tool": -1}, r"observation_loss_weight\['tool'\] must be a non-negative number"),
        ({"tool": "x"}, r"observation_loss_weight\['tool'\] must be a finite number"),
    ],
)
def test_bad_weights_are_refused(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, observation_loss_weight=given)
