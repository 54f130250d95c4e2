"""Environments of a training run in threads and processes, and limits of time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, settings, tasks, trainer_of

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
