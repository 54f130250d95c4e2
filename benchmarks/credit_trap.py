"""A text game in which a quick reward is a mistake, for the benchmark of credit; best and random play are known."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, ClassVar

from agentsgym import MultistepEnv
from agentsgym.fields import choice_field
from benchmarks.credit_games import State, Step


class AppleTree(MultistepEnv):
    """Pick the apples of a tree, or wait for more: a quick reward is a mistake.

    A tree that was left alone for n turns bears n² apples. ``"pick"`` takes them all, and it begins anew; ``"wait"``
    takes nothing. Best is to wait until the last turn, T² apples. The score is the fraction of those that was picked,
    and the game is won when all were. ``reward_scheme="apples"`` rewards that fraction as it is picked, ``"win"`` gives
    1 at the end of a game that is won. Random play draws between the two.
    """

    config_fields: ClassVar = {"reward_scheme": choice_field("apples", "win")}
    default_config: ClassVar = {"max_steps_per_episode": 6}

    def actions_of(self, observation: str) -> list[str]:
        """The same at any time."""
        return ["pick", "wait"]

    def vocabulary_texts(self) -> list[str]:
        """Every text of the game."""
        turns = range(1, self.env_config["max_steps_per_episode"] + 1)
        return [*(self._describe(age, turn) for turn in turns for age in range(1, turn + 1)), *self.actions_of("")]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        return {"done": False, "age": 1, "turn": 1, "picked": 0}

    def _format_prompt(self, state: State, step: int) -> str:
        return self._describe(state["age"], state["turn"])

    def _step_episode(self, session_id: str, state: State, action: str) -> Step:
        turns, reward_scheme = self.env_config["max_steps_per_episode"], self.env_config["reward_scheme"]
        answer = action.strip()
        gain = state["age"] ** 2 if answer == "pick" else 0
        age = 1 if gain else state["age"] + 1
        picked, is_over = state["picked"] + gain, state["turn"] == turns
        won = picked == turns**2
        reward = gain / turns**2 if reward_scheme == "apples" else float(won)
        info = {"success": won, "score": picked / turns**2, "invalid": answer not in self.actions_of("")}
        state = {**state, "age": age, "turn": state["turn"] + 1, "picked": picked}
        return state, reward, is_over, {**info, **apple_values(turns, reward_scheme=reward_scheme)}

    def _state_key(self, state: State) -> Hashable:
        return state["age"], state["turn"]

    def _describe(self, age: int, turn: int) -> str:
        return f"Turn {turn} of {self.env_config['max_steps_per_episode']}: {age**2} apples."


@cache
def apple_values(turns: int, *, reward_scheme: str) -> dict[str, float]:
    """What an episode of :class:`AppleTree` is worth, by dynamic programming over the age of the tree.

    ``V_t(n) = max(n² + V_{t-1}(1), V_{t-1}(n + 1))`` with t turns left, V_0 = 0; the mean of the two for random
    play. The win takes the one right word in each turn.

    Args:
        turns: Turns of an episode.
        reward_scheme: The ``reward_scheme`` of the environment.

    Returns:
        ``optimal_reward`` and ``random_reward``.

    >>> apple_values(2, reward_scheme="apples")
    {'optimal_reward': 1.0, 'random_reward': 0.4375}
    """
    if reward_scheme == "win":
        return {"optimal_reward": 1.0, "random_reward": 0.5**turns}
    best = blind = [0.0] * (turns + 1)
    for left in range(1, turns + 1):
        ages = range(1, turns - left + 2)
        best = [max(age**2 + best[0], best[age]) for age in ages] + [0.0]
        blind = [(age**2 + blind[0] + blind[age]) / 2 for age in ages] + [0.0]
    return {"optimal_reward": best[0] / turns**2, "random_reward": blind[0] / turns**2}
