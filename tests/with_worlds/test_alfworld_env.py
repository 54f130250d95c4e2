"""ALFWorldEnv on generated households, with the real engine in processes of its own."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentsgym import EnvProcessPool, EnvThreadPool, RandomAgent, ScriptedAgent, StopReason, check_env, evaluate, make
from agentsgym.envs import ALFWorldEnv
from agentsgym.envs.ALFWorld import ReferencePlayer
from agentsgym.envs.ALFWorld.env import TASK_TYPES
from agentsgym.envs.players import imitation_player, random_player, reference_player
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Trajectory

ROOMS = {"max_steps_per_episode": 25}


@pytest.fixture
def rows(households: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in ALFWorldEnv.get_train_dataset({"data": str(households)})]


@pytest.fixture
def env(households: Path) -> ALFWorldEnv:
    return ALFWorldEnv(None, {"data": str(households)})


def walkthrough(households: Path, row: dict[str, Any]) -> list[str]:
    return json.loads((households / row["task_data"]["game"]).read_text())["walkthrough"]


def play(households: Path, row: dict[str, Any], actions: list[str], **config: Any) -> Trajectory:
    env = ALFWorldEnv(None, {"data": str(households), **config})
    [trajectory] = env.rollout([row["task_data"]], ScriptedAgent(actions, repeat_last=True))
    return trajectory


def user_texts(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "user"]


def summary(trajectories: list[Trajectory]) -> list[Any]:
    return [(one.messages, one.turn_rewards, one.stop_reason, [*one.info.items()], one.error) for one in trajectories]


def test_every_split_and_type_is_won_by_its_walkthrough(households: Path) -> None:
    for split in ("train", "eval_in_distribution", "valid_unseen"):
        rows = ALFWorldEnv.get_eval_dataset({"data": str(households)}, split=split)
        assert {row["task_data"]["task_type"] for row in rows} == {*TASK_TYPES}
        result = evaluate(played := make(rows[0]), reference_player(played), rows)
        assert result.win_rate.mean == 1.0
        assert {one.final_reward for one in result.trajectories} == {1.0}
        assert {one.stop_reason for one in result.trajectories} == {StopReason.DONE}


def test_an_observation_is_the_engines_text_and_the_commands(households: Path, rows: list[Any]) -> None:
    output = {
        listed: user_texts(play(households, rows[0], walkthrough(households, rows[0]), show_commands=listed))
        for listed in ("all", "here", "none")
    }
    assert output["none"][0].startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert "Your task is to: " in output["none"][0]
    for everything, here, nothing in zip(*output.values(), strict=True):
        assert everything.startswith(f"{nothing}\n\nYou can: ")
        assert here.startswith(f"{nothing}\n\nYou can: ")
        commands, nearby = (text.partition("You can: ")[2].removesuffix(".").split(", ") for text in (everything, here))
        assert [one for one in commands if not one.startswith("go to ")] == nearby
        assert "help" not in commands
        assert {"look", "inventory"} <= {*nearby}


def test_progress_as_the_reward_adds_up(households: Path, rows: list[Any]) -> None:
    for row in rows:
        trajectory = play(households, row, walkthrough(households, row), reward="progress")
        assert trajectory.success
        potentials = [turn.potential for turn in trajectory.turns]
        assert None not in potentials
        assert sum(trajectory.turn_rewards) == pytest.approx(1 - potentials[0])
        assert trajectory.info["progress"] == 1.0
        differences = [after - before for before, after in zip(potentials, [*potentials[1:], 1.0], strict=True)]
        assert trajectory.turn_rewards == pytest.approx(differences)


def test_undone_progress_is_rewarded_back(households: Path, rows: list[Any]) -> None:
    [row] = [one for one in rows if "two_obj" in one["task_data"]["task_type"]]
    commands = walkthrough(households, row)
    first = next(index for index, command in enumerate(commands) if command.startswith("move "))
    thing, place = commands[first].removeprefix("move ").split(" to ")
    trajectory = play(
        households, row, [*commands[: first + 1], f"take {thing} from {place}", "look"], reward="progress"
    )
    assert trajectory.turn_rewards[first] > 0
    assert trajectory.turn_rewards[first + 1] == -trajectory.turn_rewards[first]


def test_a_command_that_does_nothing_wastes_a_turn(households: Path, rows: list[Any]) -> None:
    trajectory = play(households, rows[0], ["fly away"], max_steps_per_episode=4, rejected_penalty=0.25)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.turn_rewards == [-0.25] * 4
    assert user_texts(trajectory)[1].startswith("Nothing happens.")
    assert not any(turn.invalid for turn in trajectory.turns)
    assert trajectory.success is False


def test_or_is_an_invalid_action(households: Path, rows: list[Any]) -> None:
    trajectory = play(households, rows[0], ["fly away"], rejected_is_invalid=True, error_allowance=2)
    assert trajectory.stop_reason is StopReason.INVALID
    assert len(trajectory.turns) == 3


def test_state_keys_are_of_the_world_and_the_game(households: Path, rows: list[Any]) -> None:
    places = [word.removeprefix("go to ") for word in walkthrough(households, rows[0]) if word.startswith("go to ")]
    there = f"go to {places[0]}"
    keys = [turn.state_key for turn in play(households, rows[0], ["look", there, "look", "inventory"]).turns][:4]
    assert keys[0] == keys[1]
    assert keys[1] != keys[2]
    assert keys[2] == keys[3]
    other = play(households, rows[1], ["look"]).turns[0].state_key
    assert keys[0] != other


def test_an_observation_over_the_budget_ends_the_episode(households: Path, rows: list[Any]) -> None:
    tokenizer = chat_tokenizer()
    probe = ALFWorldEnv(tokenizer, {"data": str(households)})
    [whole] = probe.rollout([rows[0]["task_data"]], ScriptedAgent(walkthrough(households, rows[0])))
    limit = whole.turns[1].stop + 3  # no room for what the engine returns to the second command
    env = ALFWorldEnv(tokenizer, {"data": str(households), "max_trajectory_tokens": limit})
    [cut] = env.rollout([rows[0]["task_data"]], ScriptedAgent(walkthrough(households, rows[0])))
    assert cut.stop_reason is StopReason.MAX_TOKENS
    assert cut.stop_reason.truncated
    assert cut.error is None
    assert len(cut.token_ids) <= limit
    assert not env.active_states


def test_episodes_of_a_trial_share_the_conversation(households: Path, rows: list[Any]) -> None:
    config = {"data": str(households), "episodes_per_trial": 2, "keep_history": True}
    env = ALFWorldEnv(None, config)
    [trajectory] = env.rollout([rows[0]["task_data"]], reference_player(env))
    assert trajectory.final_reward == 2.0
    assert sum("Welcome" in text for text in user_texts(trajectory)) == 2


def test_pools_play_the_same_episodes(households: Path, rows: list[Any]) -> None:
    env = ALFWorldEnv(None, {"data": str(households), **ROOMS})
    tasks = [row["task_data"] for row in rows]

    def agent() -> RandomAgent:
        return RandomAgent(["go to fridge 1", "go to countertop 1", "look", "open fridge 1", "inventory"], seed=3)

    plain = summary(env.rollout(tasks, agent(), 2))
    for pool in (EnvThreadPool(4), EnvProcessPool(2)):
        with pool:
            assert summary(env.rollout(tasks, agent(), 2, pool=pool)) == plain
    fresh = ALFWorldEnv(None, {"data": str(households), **ROOMS, "cache_mb": 0.0})
    assert summary(fresh.rollout(tasks, agent(), 2)) == plain
    assert summary(pickle.loads(pickle.dumps(env)).rollout(tasks, agent(), 2)) == plain


def test_what_is_remembered_calls_the_engine_once(households: Path, rows: list[Any]) -> None:
    env = ALFWorldEnv(None, {"data": str(households), "cache_mb": 32.0, "step_timeout_s": 61.0})
    env.rollout([rows[0]["task_data"]], reference_player(env), 5)
    num_commands = len(walkthrough(households, rows[0]))
    processes: Any = env._processes()
    assert processes.num_computed == num_commands
    assert processes.num_cached == 4 * (num_commands + 1)


class Killing(ReferencePlayer):
    """Follows the walkthroughs, and kills the engines' process at its third answers."""

    num_calls = 0

    def act(self, requests: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 3:
            [pid] = self._env._processes().pids
            os.kill(pid, signal.SIGKILL)
        return super().act(requests)


def test_a_crash_costs_the_episode_that_it_hits(households: Path, rows: list[Any]) -> None:
    """Its sessions are played again in a new process; but for the one whose call found the process dead."""
    env = ALFWorldEnv(None, {"data": str(households), "cache_mb": 0.0, "num_processes": 1, "step_timeout_s": 62.0})
    trajectories = env.rollout([row["task_data"] for row in rows], Killing(env))
    failed = [one for one in trajectories if one.stop_reason is StopReason.FAILED]
    assert len(failed) == 1
    assert "was killed by SIGKILL" in str(failed[0].error)
    assert all(one.success for one in trajectories if one not in failed)
    assert len(trajectories) == len(rows) > 1


def test_players(households: Path, rows: list[Any], env: ALFWorldEnv) -> None:
    tasks = [row["task_data"] for row in rows]
    shown = env.rollout(tasks, imitation_player(env, seed=1), 4)
    assert all(one.success for one in shown)
    shortest = [len(walkthrough(households, row)) for row in rows for _ in range(4)]
    assert all(len(one.turns) >= least for one, least in zip(shown, shortest, strict=True))
    assert sum(len(one.turns) for one in shown) > sum(shortest)
    wandering = ALFWorldEnv(None, {"data": str(households), **ROOMS})
    for trajectory in wandering.rollout(tasks, random_player(wandering, seed=2)):
        assert trajectory.error is None
        assert not any("Nothing happens." in text for text in user_texts(trajectory))


def test_a_game_without_a_walkthrough_is_reported(households: Path, rows: list[Any], tmp_path: Path) -> None:
    shutil.copytree(households, tmp_path / "data")
    file = tmp_path / "data" / rows[0]["task_data"]["game"]
    file.write_text(json.dumps({**json.loads(file.read_text()), "walkthrough": None}))
    env = ALFWorldEnv(None, {"data": str(tmp_path / "data")})
    [trajectory] = env.rollout([rows[0]["task_data"]], reference_player(env))
    assert trajectory.stop_reason is StopReason.FAILED
    assert "has no walkthrough to follow" in str(trajectory.error)


def test_a_broken_game_file_fails_its_own_episode(households: Path, rows: list[Any], tmp_path: Path) -> None:
    shutil.copytree(households, tmp_path / "data")
    (tmp_path / "data" / rows[1]["task_data"]["game"]).write_text('{"grammar": ')
    env = ALFWorldEnv(None, {"data": str(tmp_path / "data")})
    good, bad = env.rollout([row["task_data"] for row in rows[:2]], reference_player(env))
    assert good.success
    assert bad.stop_reason is StopReason.FAILED
    assert "cannot be read" in str(bad.error)
    assert rows[1]["task_data"]["game"] in str(bad.error)


@pytest.mark.parametrize("listed", ["here", "none"])
def test_the_contract_holds(households: Path, listed: str) -> None:
    config = {"data": str(households), "show_commands": listed, "max_steps_per_episode": 12}
    report = check_env(ALFWorldEnv, env_config=config, max_tasks=3, raise_on="warning")
    assert not report.findings


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "alfworld.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    best, chance = map(float, ran.stdout.split())
    assert best == 1.0
    assert chance < 1.0
