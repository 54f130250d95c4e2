"""Evaluation inside the trainer: whose games its numbers are, and when it is kept."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from games import TextAgent, has_moved, logged, tasks, trainer_of

from agentsgym.statistics.metrics import summarize
from agentsgym.types import StopReason


def test_evaluation_reports_the_numbers_of_all_games(tmp_path: Path) -> None:
    """Five tasks of two rollouts in batches of eight: the mean over batches would be another."""
    trainer = trainer_of(tmp_path, eval_dataset=tasks(5), num_generations_eval=2)
    metrics = trainer.evaluate()
    evaluation = trainer.last_evaluation
    assert evaluation is not None
    games = evaluation.trajectories
    assert metrics["eval_num_episodes"] == len(games) == 10
    assert metrics["eval_num_failed"] == 0
    assert metrics["eval_win_rate"] == sum(game.stop_reason is StopReason.DONE for game in games) / 10
    assert metrics["eval_reward"] == pytest.approx(sum(game.final_reward for game in games) / 10)
    assert metrics["eval_turns"] == pytest.approx(sum(len(game.turns) for game in games) / 10)
    assert metrics["eval_turns/mean"] == metrics["eval_turns"]
    for name in ("win_rate", "reward", "turns"):
        assert metrics[f"eval_{name}_low"] <= metrics[f"eval_{name}"] <= metrics[f"eval_{name}_high"]
        assert trainer.state.log_history[-1][f"eval_{name}"] == metrics[f"eval_{name}"]
    assert math.isfinite(metrics["eval_loss"])
    assert not has_moved(trainer)
    assert trainer.evaluate()["eval_win_rate"] == metrics["eval_win_rate"]  # the same games again


def test_evaluation_plays_a_task_alike_and_its_intervals_are_over_tasks(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"task_data": {"number": i}} for i in range(6)])  # the trainer chooses the seeds
    trainer = trainer_of(tmp_path, eval_dataset=dataset, num_generations_eval=2, agent=TextAgent(), max_turn_tokens=8)
    trainer.evaluate()
    evaluation = trainer.last_evaluation
    assert evaluation is not None
    games = evaluation.trajectories
    assert [games[i].messages == games[i + 1].messages for i in range(0, 12, 2)] == [True] * 6
    assert len({str(game.messages) for game in games}) > 1
    assert evaluation.win_rate == summarize(games, clusters=[i // 2 for i in range(12)]).win_rate
    assert evaluation.win_rate != summarize(games, clusters=range(12)).win_rate


def test_a_stream_is_evaluated_too(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(partial(iter, list(tasks(5))))
    trainer = trainer_of(tmp_path, eval_dataset=stream, num_generations_eval=2)
    metrics = trainer.evaluate()
    assert trainer.last_evaluation is not None
    assert metrics["eval_num_episodes"] == len(trainer.last_evaluation.trajectories) == 10


def test_several_evaluation_sets_have_names_of_their_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset={"easy": tasks(2), "hard": tasks(5)}, num_generations_eval=2)
    metrics = trainer.evaluate()
    assert (metrics["eval_easy_num_episodes"], metrics["eval_hard_num_episodes"]) == (4, 10)
    assert "eval_win_rate" not in metrics
    assert {"eval_easy_win_rate", "eval_hard_win_rate_low"} <= metrics.keys()


def test_an_evaluation_during_training_is_kept(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=tasks(4), eval_strategy="steps", eval_steps=2, max_steps=4)
    assert trainer.last_evaluation is None
    trainer.train()
    assert len(logged(trainer, "eval_win_rate")) == 2
    assert trainer.last_evaluation is not None
    assert trainer.last_evaluation.num_episodes == 16
    assert trainer.last_evaluation.win_rate is not None
    assert trainer.last_evaluation.win_rate.mean == logged(trainer, "eval_win_rate")[-1]
