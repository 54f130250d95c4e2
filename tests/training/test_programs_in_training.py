"""A program is trained through its calls like any environment: in step, ahead of training, stored, and refused."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest
from games import logged, policy, settings, tasks

from agentsgym import CopiedPolicyAgent, GRPOEnvTrainer, RolloutStore
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.errors import ConfigError


def say(endpoint: Any, messages: list[Any]) -> tuple[str, str]:
    """Call the endpoint; return the id of the call and the answer."""
    connection = http.client.HTTPConnection(endpoint.base_url.split("/")[2], timeout=60)
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {endpoint.api_key}"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["id"], answer["choices"][0]["message"]["content"]


def say_blue(task: Any, endpoint: Any) -> None:
    """Two conversations of one call each; each is rewarded by itself if it names the color."""
    for _ in range(2):
        call, text = say(endpoint, [{"role": "user", "content": "Say a color."}])
        endpoint.reward(float("blue" in text), call)


def trainer_of(folder: Path, *, is_ahead: bool = False, **changes: Any) -> GRPOEnvTrainer:
    model, tokenizer = policy()
    env = AgentProgramEnv(tokenizer, program=say_blue)
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


def test_rollouts_of_programs_are_stored_with_their_calls(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=1, store_rollouts=str(tmp_path / "store"))
    trainer.train()
    stored = list(RolloutStore(tmp_path / "store"))
    assert len(stored) == 8
    for one in stored:
        assert len(one.turns) == 2
        assert one.info["num_conversations"] == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": "trajectory"}, "layout='turn'"),
        ({"fork_budget": 100, "advantage_estimator": "tree"}, "cannot be forked"),
    ],
)
def test_what_a_program_cannot_do_is_refused(tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trainer_of(tmp_path, **changes)
