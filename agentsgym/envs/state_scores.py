"""Reward each turn for the change of the state's score, which the hook ``_score_state`` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from agentsgym.credit.components import Reward, sum_components
from agentsgym.envs.boundary import Step, as_reward, call_environment
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.errors import EnvError
from agentsgym.types import Turn

# pyright: reportPrivateUsage=false
# The hooks are private for users of an environment; trials call them.

PROGRESS: Final = "progress"
"""The name of the reward if ``_score_state`` returns a plain number."""

CREDITS: Final = ("change", "potential")
"""How scores become rewards, the values of ``env_config["state_scores"]``.

With Φ_k the score of the state before turn k, and Φ_K that of the last state, turn k is rewarded with ``Φ_{k+1} -
Φ_k``. With ``"change"``, the rewards of an episode add up to ``Φ_K - Φ_0``, so that a policy is also rewarded for the
score with which it ends. With ``"potential"``, Φ_K counts as 0, however the episode ended: the rewards add up to
``-Φ_0``, which no action changes, so the policies that are best without scores are best with them (Ng, Harada &
Russell 1999).
"""


class StateScores:
    """The scores of one episode's states."""

    def __init__(self, env: PlayableEnv, state: State) -> None:
        """Score the first state.

        Raises:
            EnvError: The hook raised, or did not return a reward.
        """
        self._env = env
        self._last = self._scores(state)

    def credited(self, step: Step, state: State) -> Step:
        """Add to a step's reward the change of the score, given the next state."""
        if step.role_rewards is not None:
            raise EnvError("_score_state scores the state for one agent, but _step_episode returns rewards by role")
        before, self._last = self._last, self._scores(state)
        reward, components = _sum((step.reward, step.components), _difference(self._last, before))
        return step._replace(reward=reward, components=components)

    def closed(self, turn: Turn) -> Turn:
        """Return the last turn with its final reward, once no turn follows."""
        if self._env.env_config["state_scores"] == "change":
            return turn
        reward, components = _sum((turn.reward, turn.components), _difference({}, self._last))
        return replace(turn, reward=reward, components=components)

    def _scores(self, state: State) -> Mapping[str, float]:
        score, by_name = as_reward("_score_state", call_environment(self._env._score_state, state))
        return {PROGRESS: score} if by_name is None else by_name


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> Reward:
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (*before, *after)}
    return math.fsum(changes.values()), changes


def _sum(reward: Reward, change: Reward) -> Reward:
    return math.fsum((reward[0], change[0])), sum_components([reward, change], math.fsum)
