"""A program is trained through its calls like any environment: in step, ahead of training, stored, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import logged, policy, settings, tasks
from programs import SayBlueTwice

from agentsgym import ConfigError, CopiedPolicyAgent, GRPOEnvTrainer, RolloutStore


def trainer_of(folder: Path, *, is_ahead: bool = False, **changes: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    env = SayBlueTwice(tokenizer)
    agent = CopiedPolicyAgent(model, tokenizer, max_turn_tokens=2) if is_ahead else None
    values = {"layout": "turn", "max_steps": 20, "max_turn_tokens": 2, **changes}
    return GRPOEnvTrainer(model, env, settings(folder, **values), train_dataset=tasks(), agent=agent)


def test_calls_with_rewards_of_their_own_are_learned(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:4]) / 4 < 1.0
    assert sum(rewards[-4:]) / 4 > 1.6  # of 2
    assert logged(trainer, "info/num_calls") == [2.0] * 20


@pytest.mark.parametrize("kind", ["ahead of training", "threads"])
def test_programs_are_played_ahead_of_training_and_in_pools(tmp_path: Path, kind: str) -> None:
    is_ahead = kind == "ahead of training"
    changes: Any = {"max_staleness": 1} if is_ahead else {"env_pool": kind, "env_pool_kwargs": {"num_workers": 2}}
    trainer = trainer_of(tmp_path, max_steps=3, is_ahead=is_ahead, **changes)
    trainer.train()
    assert len(logged(trainer, "reward")) == 3
    assert not any(logged(trainer, "episodes/failed"))


def test_a_resumed_run_of_programs_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    straight = trainer_of(tmp_path / "straight", **saving)
    straight.train()
    resumed = trainer_of(tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert any(loss != 0 for loss in logged(straight, "loss")[2:])
    for name in ("reward", "loss", "info/num_calls"):  # the batches of calls differ, and with them the last digits
        assert logged(resumed, name) == pytest.approx(logged(straight, name), abs=1e-5)
    models: Any = resumed.model, straight.model
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_rollouts_of_programs_are_stored_with_their_calls(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1, store_rollouts=str(tmp_path / "store"))
    trainer.train()
    stored = list(RolloutStore(tmp_path / "store"))
    assert len(stored) == 8
    for one in stored:
        assert len(one.turns) == 2
        assert one.info["num_conversations"] == 2


def test_programs_need_a_row_for_each_conversation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layout='turn'"):
        trainer_of(tmp_path, layout="trajectory")
