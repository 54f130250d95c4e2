"""The losses on observations and demonstrations: value and gradient beside the policy's loss, on which tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, demonstrated, logged, policy, settings, tasks, trainer_of
from test_loss_gradients import SPLIT, assert_is_slope_of, exact, logps, loss, off_policy
from test_trl_interface import Batch, parameter_gradients
from test_turn_layout import newest

from agentsgym import ConfigError, Demonstrations, GRPOEnvTrainer, tiny_policy
from agentsgym.training.objectives.demonstrations import DemonstrationLoss
from agentsgym.training.objectives.observations import observation_weights


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


ONE = demonstrated(1)


def surprise(trainer: GRPOEnvTrainer, *, observations: bool = False) -> torch.Tensor:
    """The mean of -log p over the tokens of the only demonstration, by a plain forward pass."""
    [one] = ONE.trajectories
    ids, mask = torch.tensor([one.token_ids]), torch.tensor(one.agent_token_mask).bool()
    if observations:
        mask[mask.int().argmax() :] = True
    logits = trainer.model(input_ids=ids).logits[0, :-1]
    return -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[mask[1:]].mean()


@pytest.mark.parametrize("observation_loss", [False, True])
@pytest.mark.parametrize("layout", ["trajectory", "turn"])
def test_the_weighted_mean_over_the_demonstrations_is_added_to_the_loss(
    layout: str, observation_loss: bool, tmp_path: Path
) -> None:
    given = demonstrated(1, weight=0.3, batch_size=3, observation_loss=observation_loss)
    trainer, batch = exact(tmp_path, demonstrations=given, layout=layout)
    plain, _ = exact(tmp_path, layout=layout)
    batch = off_policy(trainer, batch)
    added = 0.3 * surprise(trainer, observations=observation_loss)
    assert added > 0
    assert loss(trainer, batch).item() == pytest.approx((loss(plain, batch) + added).item(), abs=1e-6)


def test_the_gradient_of_demonstrations_is_its_slope(tmp_path: Path) -> None:
    trainer, batch = exact(tmp_path, demonstrations=demonstrated(1, weight=0.3))
    slope = parameter_gradients(trainer, loss(trainer, {**batch, "advantages": torch.zeros_like(batch["advantages"])}))
    assert_is_slope_of(slope, trainer, lambda: 0.3 * surprise(trainer))


def test_the_gradient_of_a_step_is_that_of_both_losses(tmp_path: Path) -> None:
    changes = {
        "advantage_estimator": "grpo",
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "learning_rate": 1.0,
        "optim": "sgd",
    }
    moved: list[list[torch.Tensor]] = []
    for number, (weight, part) in enumerate([(0.0, {}), (0.5, {}), (0.5, SPLIT)]):
        own = {"demonstrations": demonstrated(1, weight=weight, batch_size=2)} if weight else {}
        with trainer_of(tmp_path / str(number), **changes, **own, **part) as trainer:
            before = [one.detach().clone() for one in trainer.model.parameters()]
            expected = torch.autograd.grad(surprise(trainer), [*trainer.model.parameters()])
            trainer.train()
            moved.append([one.detach() - old for one, old in zip(trainer.model.parameters(), before, strict=True)])
    assert any(bool(one.any()) for one in moved[0])
    for policy_alone, *both, slope in zip(*moved, expected, strict=True):
        for one in both:
            assert torch.allclose(one, policy_alone - 0.5 * slope, atol=1e-5)


def test_a_policy_imitates_where_rewards_teach_nothing(tmp_path: Path) -> None:
    given = demonstrated(weight=1.0)
    with trainer_of(tmp_path, dataset=tasks(8, secret=99), demonstrations=given, max_steps=12) as trainer:
        trainer.train()
    curve = logged(trainer, "demonstration_loss")
    assert len(curve) == 12
    assert sum(curve[-5:]) < 0.5 * sum(curve[:5])


def test_micro_batches_and_steps_draw_different_demonstrations(tmp_path: Path) -> None:
    trainer, _ = exact(tmp_path, demonstrations=demonstrated(50, batch_size=2))
    [demonstrations] = trainer.objectives
    assert isinstance(demonstrations, DemonstrationLoss)
    drawn = [demonstrations._draw()[0].tolist() for _ in range(8)]
    assert len({str(one) for one in drawn}) > 4
    trainer.state.global_step += 1
    assert demonstrations._draw()[0].tolist() != drawn[0]
    trainer.state.global_step -= 1
    assert demonstrations._draw()[0].tolist() == drawn[0]
    demonstrations.on_train_begin(trainer.args, trainer.state, trainer.control)  # after an interruption in this step
    assert demonstrations._draw()[0].tolist() == drawn[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": 0}, r"Demonstrations\(weight\) must be a positive number, got 0"),
        ({"batch_size": 0}, r"Demonstrations\(batch_size\) must be a positive int, got 0"),
        ({"observation_loss": "yes"}, r"Demonstrations\(observation_loss\) must be True or False, got 'yes'"),
    ],
)
def test_bad_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Demonstrations(trajectories=ONE.trajectories, **given)


def test_nothing_to_imitate_and_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one trajectory that did not fail, got 0"):
        trainer_of(tmp_path, demonstrations=Demonstrations(trajectories=[]))
    small, tokenizer = tiny_policy(["a"])
    with pytest.raises(ConfigError, match=r"has the token id \d+, but the model has embeddings for"):
        GRPOEnvTrainer(small, GuessNumber(tokenizer), settings(tmp_path), train_dataset=tasks(), demonstrations=ONE)
