"""Reward each turn for the change of the state's score, which the hook ``_score_state`` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agentsgym.credit.components import Reward, sum_components
from agentsgym.envs.boundary import Step, as_reward, call_environment
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.errors import ConfigError, EnvError
from agentsgym.fields import Field, is_fraction
from agentsgym.types import Turn

# pyright: reportPrivateUsage=false
# The hooks are private for users of an environment; trials call them.

PROGRESS: Final = "progress"
"""The name of the reward if ``_score_state`` returns a plain number."""

CREDITS: Final = ("change", "potential")
"""How scores become rewards, the values of ``env_config["state_scores"]``.

With Φ_k the score of the state before turn k, and Φ_K that of the last state, ``"change"`` rewards turn k with
``Φ_{k+1} - Φ_k``. The rewards of an episode add up to ``Φ_K - Φ_0``, so that a policy is also rewarded for the score
with which it ends.

``"potential"`` rewards turn k with ``score_discount * Φ_{k+1} - Φ_k``; Φ_K counts as 0, however the episode ended.
Discounted by ``score_discount``, the rewards add up to ``-Φ_0``, which no action changes, so the policies that are best
without scores are best with them (Ng, Harada & Russell 1999).
"""


DISCOUNT: Final = Field(default=1.0, expected="a number in [0, 1]", valid=is_fraction)
"""``env_config["score_discount"]``."""


def check_discount(config: Mapping[str, Any], discount: float) -> None:
    """Reject a discount of returns other than the ``env_config``'s, since scores would change which policy is best."""
    own = config.get("score_discount", 1.0)
    if config.get("state_scores") == "potential" and own != discount:
        raise ConfigError(
            f"with env_config['state_scores'] = 'potential', env_config['score_discount'] = {own!r} must be the "
            f"discount of the returns, which is {discount!r} (1.0 for an estimator that does not discount)"
        )


class StateScores:
    """The scores of one episode's states."""

    def __init__(self, env: PlayableEnv, state: State) -> None:
        """Score the first state.

        Raises:
            EnvError: The hook raised, or did not return a reward.
        """
        config = env.env_config
        self._env, self._is_change = env, config["state_scores"] == "change"
        self._discount = 1.0 if self._is_change else config["score_discount"]
        self._last = self._scores(state)

    def credited(self, step: Step, state: State) -> Step:
        """Add to a step's reward the change of the score, given the next state."""
        if step.role_rewards is not None:
            raise EnvError("_score_state scores the state for one agent, but _step_episode returns rewards by role")
        before, self._last = self._last, self._scores(state)
        if PROGRESS in self._last and PROGRESS in (step.components or ()):
            raise EnvError(f"_step_episode's reward has {PROGRESS!r}, the name of what _score_state adds: rename it")
        change = _difference(self._discounted(), before)
        reward, components = _sum((step.reward, step.components), change)
        return step._replace(reward=reward, components=components)

    def closed(self, turn: Turn) -> Turn:
        """Return the last turn with its final reward, once no turn follows."""
        if self._is_change:
            return turn
        reward, components = _sum((turn.reward, turn.components), _difference({}, self._discounted()))
        return replace(turn, reward=reward, components=components)

    def _discounted(self) -> dict[str, float]:
        return {name: self._discount * score for name, score in self._last.items()}

    def _scores(self, state: State) -> Mapping[str, float]:
        score, by_name = as_reward("_score_state", call_environment(self._env._score_state, state))
        return {PROGRESS: score} if by_name is None else by_name


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> Reward:
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (*before, *after)}
    return math.fsum(changes.values()), changes


def _sum(reward: Reward, change: Reward) -> Reward:
    return math.fsum((reward[0], change[0])), sum_components([reward, change], math.fsum)
