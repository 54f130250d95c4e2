"""Demonstrations that the policy keeps imitating: their loss and gradient, which ones are drawn, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, demonstrated, logged, settings, tasks, trainer_of
from test_loss_gradients import SPLIT, assert_is_slope_of, exact, loss, off_policy
from test_trl_interface import Batch, parameter_gradients

from agentsgym.errors import ConfigError
from agentsgym.tiny import tiny_policy
from agentsgym.training.objectives.demonstrations import DemonstrationLoss, Demonstrations
from agentsgym.training.trainer import GRPOEnvTrainer

ONE = demonstrated(1)


def surprise(trainer: GRPOEnvTrainer, *, observations: bool = False) -> torch.Tensor:
    """The mean of -log p over the tokens of the only demonstration, by a plain forward pass."""
    [one] = ONE.trajectories
    ids, mask = torch.tensor([one.token_ids]), torch.tensor(one.agent_token_mask).bool()
    if observations:
        mask[mask.int().argmax() :] = True
    logits = trainer.model(input_ids=ids).logits[0, :-1]
    return -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[mask[1:]].mean()


def flat(batch: Batch) -> Batch:
    return {**batch, "advantages": torch.zeros_like(batch["advantages"])}


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


def test_its_gradient_is_its_slope(tmp_path: Path) -> None:
    trainer, batch = exact(tmp_path, demonstrations=demonstrated(1, weight=0.3))
    slope = parameter_gradients(trainer, loss(trainer, flat(batch)))
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
