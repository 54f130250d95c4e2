"""Rollouts recorded elsewhere are trained on, as those that a trainer plays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, settings, tasks

from agentsgym import RolloutStore, Trajectory
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.envs.recorded import RecordedEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.training.trainer import GRPOEnvTrainer

Recorded = Callable[[int], tuple[list[Trajectory], list[Trajectory]]]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Rollouts of a policy for a number of tasks, and the same read from a store."""

    def read(num_tasks: int) -> tuple[list[Trajectory], list[Trajectory]]:
        model, tokenizer = policy()
        agent = PolicyAgent(model, tokenizer, max_turn_tokens=4)
        played = GuessNumber(tokenizer).rollout([row["task_data"] for row in tasks(num_tasks)], agent, 4)
        with RolloutStore.writer(tmp_path / "store") as writer:
            for one in played:
                writer.add(one)
        return played, [*RolloutStore(tmp_path / "store")]

    return read


def trainer_on(folder: Path, trajectories: list[Trajectory], **changes: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    env = RecordedEnv(tokenizer, trajectories, num_generations=4)
    options: dict[str, Any] = {"layout": "turn", "max_steps": 1, **changes}
    return GRPOEnvTrainer(model, env, settings(folder, **options), train_dataset=env.rows())


def test_stored_rollouts_are_trained_as_those_that_were_played(recorded: Recorded, tmp_path: Path) -> None:
    played, read = recorded(2)
    assert [one.token_ids for one in read] == [one.token_ids for one in played]
    batches: list[Any] = []
    for trajectories in (played, read):
        trainer = trainer_on(tmp_path, trajectories, vllm_importance_sampling_correction=True)
        trainer.train()
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
        assert max(logged(trainer, "grad_norm")) > 0
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-5
        batches.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
    assert any(not torch.equal(batches[0][name], one) for name, one in policy()[0].state_dict().items())
    assert all(torch.equal(batches[0][name], one) for name, one in batches[1].items())


def test_every_task_group_is_trained_once_in_an_epoch(recorded: Recorded, tmp_path: Path) -> None:
    _, read = recorded(4)
    trainer = trainer_on(tmp_path, read, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=4)
    seen: list[str] = []
    generate = trainer.generator.generate

    def watched(*given: Any) -> Any:
        batch = generate(*given)
        seen.extend(str(one.token_ids) for one in batch.trajectories)
        return batch

    trainer.generator.generate = watched
    trainer.train()
    assert sorted(seen) == sorted(str(one.token_ids) for one in read)


def test_a_task_group_of_another_size_is_rejected(recorded: Recorded, tmp_path: Path) -> None:
    _, read = recorded(2)
    with pytest.raises(ConfigError, match="num_generations must be 4"):
        trainer_on(tmp_path, read, num_generations=8).train()


def test_rollouts_that_cannot_be_trained_on_are_named(recorded: Recorded) -> None:
    _, read = recorded(1)
    tokenizer = policy()[1]
    with pytest.raises(ConfigError, match=r"multiple of num_generations \(3\) rollouts, got 4 with task_index=0"):
        RecordedEnv(tokenizer, read, num_generations=3)
    with pytest.raises(TaskError, match="first must be the index"):
        RecordedEnv(tokenizer, read, num_generations=2).check_task({"first": 1})
    with pytest.raises(ConfigError, match=r"trajectories\[1\] cannot be trained on"):
        RecordedEnv(tokenizer, [read[0], dataclasses.replace(read[1], turns=[])], num_generations=2)
