"""The games of the credit benchmark, which keep their last texts and know the scores of random and optimal play."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from agentsgym import MultistepEnv
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from benchmarks.credit_games import CoinMaze, GuessTheNumber, guess_values, maze_values
from benchmarks.credit_trap import AppleTree, apple_values


class Watched(MultistepEnv):
    """A mixin that keeps the last text of each session, in the order in which sessions began."""

    last_info: dict[str, dict[str, Any]]

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], Any, bool, dict[str, Any]]:
        step: Any = super()._step_episode(session_id, state, action)  # pyright: ignore[reportAbstractUsage]  # the game's
        self.last_info[session_id] = step[3]
        return step

    def anchors(self) -> dict[str, float]:
        """The expected score, in [0, 1], of best and of random play: ``optimal_reward`` and ``random_reward``."""
        raise NotImplementedError


class WatchedGuess(Watched, GuessTheNumber):
    """Guess the number, scored by the fraction of numbers found."""

    def anchors(self) -> dict[str, float]:
        """By dynamic programming; a fraction is the same for one round and for many."""
        return guess_values(self.env_config["size"], self.env_config["guesses"], rounds=1, reward_scheme="find")


class WatchedMaze(Watched, CoinMaze):
    """The maze, scored by the fraction of coins taken."""

    def anchors(self) -> dict[str, float]:
        """By dynamic programming, the mean over the starts."""
        worths = maze_values(
            self.env_config["maze"], self.env_config["max_steps_per_episode"], reward_scheme="coins"
        ).values()
        return {key: fmean(worth[key] for worth in worths) for key in ("optimal_reward", "random_reward")}


class WatchedTree(Watched, AppleTree):
    """The tree, scored by the fraction of apples."""

    def anchors(self) -> dict[str, float]:
        """By dynamic programming."""
        return apple_values(self.env_config["max_steps_per_episode"], reward_scheme="apples")


class WatchedTwentyQuestions(Watched, TwentyQuestionsEnv):
    """Twenty Questions, scored by the win; a wrong guess ends it."""

    def anchors(self) -> dict[str, float]:
        """Greedy play wins always; random play draws from all questions and guesses until it hits on a guess."""
        objects, properties = len(self.candidates.objects), len(self.candidates.properties)
        never = (properties / (objects + properties)) ** self.env_config["max_steps_per_episode"]
        return {"optimal_reward": 1.0, "random_reward": (1 - never) / objects}
