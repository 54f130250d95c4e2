"""The benchmark of credit in engines: its worlds are solved by the walkthrough, and a policy takes a step in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.ALFWorld import ALFWorldEnv
from benchmarks import credit, credit_worlds, world_texts


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit_worlds, "_HOUSEHOLDS", tmp_path / "households")
    credit_worlds._households.cache_clear()  # pyright: ignore[reportPrivateUsage]


def few_worlds(name: str) -> Any:
    game: Any = credit_worlds.GAMES[name]
    num_worlds = 6 if name == "households" else 2  # a quest takes a second or two to be made
    learns = {"warm_start_steps": 2, "num_episodes": 16, "batch_size": 16, "num_updates": 2, "num_evaluated": 4}
    return replace(game, num_worlds=num_worlds, num_demonstrations=num_worlds, **learns)


@pytest.mark.parametrize("name", credit_worlds.GAMES)
def test_the_demonstrator_solves_every_world_and_earns_all_that_is_left_to_earn(name: str) -> None:
    game = few_worlds(name)
    env = game.make()
    played = env.rollout(game.tasks("demonstrations", 0, 6), game.demonstrator(env, 0))
    assert [one.success for one in played] == [True] * 6
    least = 0.5 if name == "households" else 1.0  # some conditions of a household's goal may hold from the start
    assert all(least <= one.final_reward + 1e-9 <= 1.0 + 2e-9 for one in played)
    assert len({one.messages[0]["content"] for one in played}) > 1


def test_what_a_household_does_not_handle_is_answered_as_its_engine_does() -> None:
    game = few_worlds("households")
    env = game.make()
    stock = ALFWorldEnv(None, env.env_config)
    [task] = game.tasks("demonstrations", 0, 1)
    [shown] = env.rollout([task], game.demonstrator(env, 0))
    output = [message["content"] for message in shown.messages if message["role"] == "assistant"]
    commands = [one for command in output[:-1] for one in ("fly", command, "take sun 1 from sky 1", "inventory")]
    [spared], [requested] = (one.rollout([task], ScriptedAgent(commands)) for one in (env, stock))
    assert spared.turn_rewards == requested.turn_rewards
    heard = [message["content"] for message in requested.messages if message["role"] == "user"]
    assert [world_texts.of_household(text) for text in heard] == [
        message["content"] for message in spared.messages if message["role"] == "user"
    ]


@pytest.mark.filterwarnings("default")  # TRL and transformers warn for reasons of their own
@pytest.mark.parametrize("arm", ["warm_start", "gigpo"])
def test_a_household_is_learned_and_played_afterwards(arm: str, tmp_path: Path) -> None:
    games = {"households": few_worlds("households")}
    run = credit.learn("households", arm, 0, tmp_path, games=games)
    assert (run.num_episodes, run.num_evaluated) == (0 if arm == "warm_start" else 16, 4)
    assert run.held_out_win_rate is not None
