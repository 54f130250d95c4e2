"""Environments of a training run in threads and processes, and limits of time."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, settings, tasks, trainer_of
from transformers import TrainerCallback

from agentsgym import ConfigError, EnvProcessPool, GRPOEnvTrainer
from agentsgym.rollouts.worker_set import WorkerLimits


class SometimesStuck(GuessNumber):
    """Every fourth task waits before its first step."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if state["secret"] == 0:
            time.sleep(5)
        return super()._step_episode(session_id, state, action)


def weights(trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
    return list(trainer.model.state_dict().values())


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_where_the_environments_run_does_not_change_what_is_learnt(pool: str, tmp_path: Path) -> None:
    here, there = trainer_of(tmp_path), trainer_of(tmp_path, env_pool=pool, env_pool_kwargs={"num_workers": 2})
    for trainer in (here, there):
        trainer.train()
    for one, other in zip(weights(here), weights(there), strict=True):
        torch.testing.assert_close(one, other)
    assert logged(here, "reward") == logged(there, "reward")


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_trainers_workers_end_with_its_training_and_its_evaluations(pool: str, tmp_path: Path) -> None:
    earlier = {*multiprocessing.active_children(), *threading.enumerate()}  # which may end at any time

    def workers() -> set[Any]:
        threads = [one for one in threading.enumerate() if not one.name.startswith("asyncio_")]
        return {*multiprocessing.active_children(), *threads} - earlier

    trainer = trainer_of(
        tmp_path,
        env_pool=pool,
        env_pool_kwargs={"num_workers": 2},
        max_steps=2,
        eval_dataset=tasks(),
        eval_strategy="steps",
        eval_steps=1,
    )
    seen: set[int] = set()

    class Look(TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            assert workers()
            seen.update(map(id, workers()))

    trainer.add_callback(Look())
    trainer.train()
    assert workers() == set()
    assert len(seen) == (2 if pool == "threads" else 4)  # the same in all evaluations: processes, and their readers
    trainer.remove_callback(Look)
    trainer.evaluate()
    assert workers() == set()


def test_a_pool_is_made_with_the_arguments_that_the_settings_have_for_it(tmp_path: Path) -> None:
    given = {
        "num_workers": 3,
        "max_sessions_per_worker": 4,
        "max_memory_mb": 2000,
        "recycle_after_episodes": 100,
        "recycle_above_mb": 1500.0,
    }
    for options in (given, json.dumps(given)):
        pool = settings(tmp_path, env_pool="processes", env_pool_kwargs=options).make_env_pool()
        assert isinstance(pool, EnvProcessPool)
        assert pool.num_workers == 3
        assert pool.limits == WorkerLimits(
            max_sessions=4, max_memory_mb=2000, recycle_after_episodes=100, recycle_above_mb=1500.0
        )
    for kind in ("threads", "processes"):
        pool = settings(tmp_path, env_pool=kind).make_env_pool()
        assert pool is not None
        assert pool.num_workers == 8
    assert settings(tmp_path).make_env_pool() is None


@pytest.mark.parametrize(
    ("env_pool", "given", "sentence"),
    [
        ("processes", {"num_worker": 1}, "['num_worker'] is unknown for env_pool='processes'; did you mean 'num"),
        ("threads", {"max_memory_mb": 2000}, "is unknown for env_pool='threads'; valid names: 'num_workers'"),
        ("processes", {"num_workers": 0}, "env_pool_kwargs: num_workers must be a positive int, got 0"),
        ("threads", {"num_workers": 1.5}, "env_pool_kwargs: num_workers must be a positive int, got 1.5"),
        (
            "processes",
            {"max_memory_mb": "much"},
            "env_pool_kwargs: max_memory_mb must be a positive number of megabytes or None, got 'much'",
        ),
        ("threads", [1], "env_pool_kwargs must be a dict, or a JSON object from a command line, got [1]"),
        (
            "threads",
            "{num_workers: 1}",
            "env_pool_kwargs must be a dict, or a JSON object from a command line, got '{num_workers: 1}'",
        ),
        (None, {"num_workers": 2}, "env_pool_kwargs requires env_pool='threads' or 'processes'"),
    ],
)
def test_arguments_that_a_pool_does_not_take_are_refused(
    env_pool: str | None, given: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        settings(tmp_path, env_pool=env_pool, env_pool_kwargs=given)


def test_a_stuck_game_costs_its_own_rollouts(tmp_path: Path) -> None:
    model, tokenizer = policy()
    rows = [{"task_data": {"seed": seed, "secret": seed % 2}} for seed in range(8)]
    dataset = type(tasks()).from_list(rows)
    args = settings(
        tmp_path, env_pool="threads", turn_timeout_s=0.3, max_failed_fraction=0.6, max_steps=1, shuffle_dataset=False
    )
    trainer = GRPOEnvTrainer(model, SometimesStuck(tokenizer), args, train_dataset=dataset)
    trainer.train()
    assert logged(trainer, "failed") == [0.5]
    assert logged(trainer, "grad_norm")[0] > 0
