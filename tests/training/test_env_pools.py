"""Environments of a training run in threads and processes, and limits of time."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, settings, tasks, trainer_of
from transformers import TrainerCallback

from agentsgym.errors import ConfigError
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.worker_set import WorkerLimits
from agentsgym.training.trainer import GRPOEnvTrainer


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
    here, there = trainer_of(tmp_path), trainer_of(tmp_path, env_pool=pool, num_env_workers=2)
    for trainer in (here, there):
        trainer.train()
    for one, other in zip(weights(here), weights(there), strict=True):
        torch.testing.assert_close(one, other)
    assert logged(here, "reward") == logged(there, "reward")


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_trainers_workers_end_with_its_training_and_its_evaluations(pool: str, tmp_path: Path) -> None:
    def workers() -> tuple[set[Any], set[Any]]:
        return set(multiprocessing.active_children()), set(threading.enumerate())

    before = workers()
    trainer = trainer_of(
        tmp_path,
        env_pool=pool,
        num_env_workers=2,
        max_steps=2,
        eval_dataset=tasks(),
        eval_strategy="steps",
        eval_steps=1,
    )
    seen: set[int] = set()

    class Look(TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            assert workers() != before
            seen.update(id(one) for one in set().union(*workers()) - set().union(*before))

    trainer.add_callback(Look())
    trainer.train()
    assert workers() == before
    assert len(seen) == (2 if pool == "threads" else 4)  # the same in all evaluations: processes, and their readers
    trainer.remove_callback(Look)
    trainer.evaluate()
    assert workers() == before


def test_the_limits_of_worker_processes_are_settings(tmp_path: Path) -> None:
    limits = {
        "env_worker_sessions": 4,
        "env_worker_memory_mb": 2000,
        "env_worker_recycle_episodes": 100,
        "env_worker_recycle_mb": 1500.0,
    }
    pool = settings(tmp_path, env_pool="processes", **limits).make_env_pool()
    assert isinstance(pool, EnvProcessPool)
    assert pool.limits == WorkerLimits(
        max_sessions=4, max_memory_mb=2000, recycle_after_episodes=100, recycle_above_mb=1500.0
    )
    with pytest.raises(ConfigError, match=r"GRPOEnvConfig\(env_worker_memory_mb=2000\) is for env_pool='processes'"):
        settings(tmp_path, env_pool="threads", env_worker_memory_mb=2000).make_env_pool()
    with pytest.raises(ConfigError, match=r"GRPOEnvConfig.env_worker_sessions must be a positive int or None, got 0"):
        settings(tmp_path, env_worker_sessions=0)


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
