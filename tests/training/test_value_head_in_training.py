"""A value head in whole runs: it learns, is saved and resumed, and nothing of it is left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from games import GuessNumber, logged, policy, settings, tasks, trainer_of
from test_resume import Interruption, assert_equal_weights, history, trained, unseeded

from agentsgym import ConfigError, GRPOEnvTrainer
from agentsgym.training.model_checks import check_parts

KINDS = [
    {"advantage_estimator": "turn_gae", "value_head": "shared", "value_head_kwargs": {"learning_rate": 0.02}},
    {"advantage_estimator": "bilevel_gae", "value_head": "separate", "value_head_kwargs": {"learning_rate": 0.01}},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["value_head"])


def values_of(trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
    assert trainer.value_model is not None
    return [parameter.detach().clone() for parameter in trainer.value_model.parameters()]


@kinds
def test_it_learns_the_rewards_of_the_games(kind: dict[str, Any], tmp_path: Path) -> None:
    """Nobody can win: four turns that cost a tenth each."""
    trainer = trained(tmp_path, dataset=tasks(secret=99), max_steps=40, **{**kind, "learning_rate": 0.0})
    losses = logged(trainer, "value_loss")
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in trainer.value_model.parameters())


@kinds
def test_a_resumed_run_goes_on_with_it(kind: dict[str, Any], tmp_path: Path) -> None:
    changes = {"max_steps": 4, "num_iterations": 2, "lr_scheduler_type": "linear", **kind}
    straight = trained(tmp_path / "straight", save_strategy="steps", save_steps=2, **changes)
    resumed = trainer_of(tmp_path / "second", dataset=straight.train_dataset, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert history(resumed)[2:] == history(straight)[2:]
    assert_equal_weights(resumed, straight)
    assert all(map(torch.equal, values_of(resumed), values_of(straight)))


@kinds
def test_one_trainer_may_train_twice_and_resume_after_an_interruption(kind: dict[str, Any], tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    sizes = {"per_device_train_batch_size": 4}
    straight = trained(tmp_path / "straight", max_steps=3, **saving, **sizes, **kind)
    interrupted = trainer_of(
        tmp_path / "first",
        dataset=straight.train_dataset,
        max_steps=3,
        callbacks=[Interruption(2)],
        **saving,
        **sizes,
        **kind,
    )
    with pytest.raises(KeyboardInterrupt):
        interrupted.train()
    interrupted.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert history(interrupted)[1:] == history(straight)[1:]
    assert all(map(torch.equal, values_of(interrupted), values_of(straight)))
    interrupted.train()
    assert len(interrupted.optimizer.param_groups) == len(straight.optimizer.param_groups)


@kinds
@pytest.mark.parametrize("layout", ["trajectory", "turn"])
def test_a_rollout_that_could_not_start_ends_nothing(kind: dict[str, Any], layout: str, tmp_path: Path) -> None:
    rows = [{"task_data": {"seed": 0}}, {"task_data": {"seed": 1, "cannot_start": True}}] * 2
    sizes = {"per_device_train_batch_size": 1, "steps_per_generation": 8, "gradient_accumulation_steps": 8}
    trainer = trained(
        tmp_path, dataset=Dataset.from_list(rows), max_failed_fraction=1.0, layout=layout, **sizes, **kind
    )
    assert logged(trainer, "failed") == [0.5, 0.5]
    assert all(map(math.isfinite, logged(trainer, "value_loss")))


def test_it_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1, **KINDS[0])
    own = {id(parameter) for parameter in trainer.value_model.parameters()}
    rates = {
        group["lr"] for group in trainer.optimizer.param_groups if own & {id(tensor) for tensor in group["params"]}
    }
    assert rates == {0.02}


@kinds
def test_its_loss_is_logged_alike_however_a_step_is_cut(kind: dict[str, Any], tmp_path: Path) -> None:
    still = {**kind, "learning_rate": 0.0, "value_head_kwargs": {"learning_rate": 1e-12}, "max_steps": 2}
    whole = trained(tmp_path, **still)
    parts = trained(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, **still)
    assert logged(parts, "value_loss") == pytest.approx(logged(whole, "value_loss"), rel=1e-5)
    assert all(math.isfinite(loss) and loss > 0 for loss in logged(whole, "value_loss"))


def test_a_checkpoint_with_a_head_is_not_resumed_without(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **KINDS[0])
    trainer = trainer_of(tmp_path, dataset=unseeded(), max_steps=2)
    with pytest.raises(ConfigError, match=r"saved with a value head, which value_head=None would drop"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_scheduler_that_knows_nothing_of_it_is_refused(tmp_path: Path) -> None:
    model, tokenizer = policy()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    args = settings(tmp_path, max_steps=1, **KINDS[0])
    with pytest.raises(ConfigError, match=r"pass \(optimizer, None\)"):
        GRPOEnvTrainer(model, GuessNumber(tokenizer), args, train_dataset=tasks(), optimizers=(optimizer, scheduler))
    trainer = GRPOEnvTrainer(model, GuessNumber(tokenizer), args, train_dataset=tasks(), optimizers=(optimizer, None))
    trainer.train()
    assert any(tensor.any() for tensor in values_of(trainer))


def test_experts_whose_loss_would_be_counted_once_a_part_are_refused(tmp_path: Path) -> None:
    parts = *policy(), settings(tmp_path, layout="turn"), Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="set router_aux_loss_coef to 0"):
        check_parts(*parts, has_aux_loss=True, has_own_scheduler=False)
    check_parts(*parts, has_aux_loss=False, has_own_scheduler=False)
