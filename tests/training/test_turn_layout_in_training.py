"""Whole runs on rows of one turn or of a few: trained, evaluated, interrupted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from games import has_moved, history, logged, tasks, trainer_of
from test_turn_layout import HISTORIES, SCHEDULES, newest, rewriting

from agentsgym.training.trainer import GRPOEnvTrainer


@pytest.mark.parametrize("history", ["append", *HISTORIES])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_it_trains_and_no_number_is_lost(loss_type: str, history: Any, tmp_path: Path) -> None:
    changes = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4, "beta": 0.0, "seed": 1}
    trainer = rewriting(tmp_path, history, loss_type=loss_type, drift_interval=1, **changes)
    trainer.train()
    assert trainer.state.global_step == 4
    numbers = [value for log in trainer.state.log_history for value in log.values()]
    assert all(value is not None and math.isfinite(value) for value in numbers)
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
    assert has_moved(trainer)


@pytest.mark.parametrize("changes", [{"off_policy_mask_threshold": 0.1}, {"delta": 2.0}])
def test_what_else_trl_offers_takes_rows_of_any_number(changes: dict[str, float], tmp_path: Path) -> None:
    trainer = rewriting(tmp_path, per_device_train_batch_size=4, steps_per_generation=2, **changes)
    trainer.train()
    assert all(math.isfinite(norm) for norm in logged(trainer, "grad_norm"))
    assert has_moved(trainer)


@pytest.mark.parametrize("history", [newest, "rerender"])
def test_an_evaluation_of_rewritten_games_counts_each_of_them(history: Any, tmp_path: Path) -> None:
    trainer = rewriting(tmp_path, history, eval_dataset=tasks(3), per_device_eval_batch_size=4, drift_interval=1)
    metrics = trainer.evaluate()
    assert metrics["eval_num_episodes"] == 12
    assert math.isfinite(metrics["eval_loss"])
    assert metrics["eval_entropy"] > 0
    assert trainer.last_evaluation is not None
    assert max(len(trajectory.segments) for trajectory in trainer.last_evaluation.trajectories) > 1


def with_rewritten_games(folder: Path, **changes: Any) -> GRPOEnvTrainer:
    dataset = tasks(20)  # more than are played: where a dataset is gone through again, a resumed run shuffles it anew
    return trainer_of(folder, env_config={"history": newest}, layout="turn", **{"dataset": dataset, **changes})


@pytest.mark.parametrize("schedule", [*SCHEDULES][1:])
def test_a_run_that_was_interrupted_goes_on_as_if_nothing_had_happened(schedule: str, tmp_path: Path) -> None:
    changes = {"max_steps": 4, "lr_scheduler_type": "linear", **SCHEDULES[schedule]}
    straight = with_rewritten_games(tmp_path / "straight", **changes)
    straight.train()
    first = with_rewritten_games(tmp_path / "first", save_strategy="steps", save_steps=2, **changes)
    first.train()
    resumed = with_rewritten_games(tmp_path / "second", weights=1, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert history(resumed)[2:] == history(straight)[2:]
    assert any(abs(log["loss"]) > 0 for log in history(resumed)[2:])
    ours, theirs = resumed.model.state_dict(), straight.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_evaluation_on_the_way_changes_no_number(tmp_path: Path) -> None:
    changes = {"max_steps": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    plain = with_rewritten_games(tmp_path, **changes)
    plain.train()
    evaluated = with_rewritten_games(tmp_path, eval_strategy="steps", eval_steps=1, eval_dataset=tasks(3), **changes)
    evaluated.train()
    assert len(logged(evaluated, "eval_win_rate")) == 4
    assert history(evaluated) == history(plain)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "dapo"])
def test_the_loss_of_an_evaluation_does_not_know_of_rows_that_only_fill(loss_type: str, tmp_path: Path) -> None:
    """Twelve rows in batches of eight: the last is half empty."""
    changes = {"eval_dataset": tasks(3), "per_device_eval_batch_size": 8, "loss_type": loss_type}
    one, other = (trainer_of(tmp_path, layout=layout, **changes).evaluate() for layout in ("trajectory", "turn"))
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-6)
    assert one["eval_loss"] != 0.0
