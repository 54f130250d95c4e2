"""Every packaged environment's own players play it, and a class of a user's offers its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from guess_game import GuessEnv
from packaged import PACKAGED, packaged, packaged_tasks

from agentsgym import ConfigError, ExploringAgent, RandomAgent
from agentsgym.envs import TextArenaEnv
from agentsgym.envs.players import anchors_of, has_random_player, random_player, reference_player
from agentsgym.envs.spec import Anchors

WITH_REFERENCE = {
    "TwentyQuestions",
    "PriceList",
    "Search, tools",
    "Search, tags",
    "FrozenLake-v1",
    "Taxi-v4",
    "CliffWalking-v1",
    "Blackjack-v1",
    "Terminal",
    "TextArena, one player",
    "TextArena, two players",
}


@pytest.mark.parametrize("name", PACKAGED)
def test_its_own_players_play_it(name: str) -> None:
    env, tasks = packaged(name), packaged_tasks(name)[:3]
    assert not any(one.failed for one in env.rollout(tasks, random_player(env, 1)))
    if name in WITH_REFERENCE:
        assert not any(one.failed for one in env.rollout(tasks, reference_player(env, 1)))
    else:
        with pytest.raises(ConfigError):
            reference_player(env)


def test_the_same_seed_makes_the_same_player() -> None:
    env, tasks = packaged("PriceList"), packaged_tasks("PriceList")
    first, again, other = ([one.messages for one in env.rollout(tasks, random_player(env, seed))] for seed in (3, 3, 4))
    assert first == again != other


class Mine(GuessEnv):
    """A game that brings its players along."""

    def random_player(self, seed: int) -> Any:
        return RandomAgent(["1", "2"], seed=seed)

    def reference_player(self, seed: int) -> Any:
        return RandomAgent(["3"], seed=seed)

    def anchors_of(self, task_data: Mapping[str, Any]) -> Anchors:
        return Anchors(random=0.0, optimal=float(task_data["seed"]))


def test_a_class_offers_its_own() -> None:
    assert has_random_player(Mine)
    assert not has_random_player(GuessEnv)
    assert isinstance(random_player(Mine()), RandomAgent)
    assert isinstance(reference_player(Mine()), RandomAgent)
    assert isinstance(random_player(GuessEnv()), ExploringAgent)
    known = anchors_of(Mine())
    assert known is not None
    assert known({"seed": 3}) == Anchors(random=0.0, optimal=3.0)
    assert anchors_of(GuessEnv()) is None
    with pytest.raises(ConfigError, match=r"has no reference player .*define reference_player\(self, seed\)"):
        reference_player(GuessEnv())


def test_anchors_are_of_the_game_as_it_is_played() -> None:
    exact = anchors_of(TextArenaEnv(env_config={"game": "GuessTheNumber-v0", "max_steps_per_episode": 4}))
    assert exact is not None
    assert exact({}) is not None
    assert anchors_of(TextArenaEnv(env_config={"game": "Wordle-v0"})) is None
    strange = TextArenaEnv(env_config={"game": "TicTacToe-v0", "opponent": "first"})
    assert anchors_of(strange) is None
    with pytest.raises(ConfigError, match="exact values are known only for games against the opponent 'random'"):
        reference_player(strange)
