"""Baseline players, for comparison and as sources of demonstrations."""

from __future__ import annotations

from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import RandomAgent
from agentsgym.envs.Gymnasium.descriptions import map_from_frame
from agentsgym.envs.Gymnasium.env import NEW_GAME, GymnasiumEnv
from agentsgym.errors import AgentError, ConfigError
from agentsgym.texts import shown
from agentsgym.types import Message


class RandomPlayer(RandomAgent):
    """Picks each action with equal probability; its expected return is ``info["random_reward"]``.

    Args:
        env: The environment.
        seed: The seed of every conversation's random stream.
    """

    def __init__(self, env: GymnasiumEnv, seed: int = 0) -> None:
        super().__init__([f"[{env.actions.name_of(number)}]" for number in env.actions.values], seed=seed)


class OptimalPlayer(Agent):
    """Plays optimally for the remaining turns; its expected return is ``info["optimal_reward"]``.

    It sees only the rendered frames, not the environment's state.

    Args:
        env: An environment whose exact values are known.
        seed: Unused, since the player is deterministic.

    Raises:
        ConfigError: The exact values are unknown.
    """

    def __init__(self, env: GymnasiumEnv, seed: int = 0) -> None:
        exact = env.exact_values()
        if exact is None or not exact.frames:
            raise ConfigError(
                "OptimalPlayer supports only environments with known exact values: FrozenLake, Taxi, CliffWalking and "
                "Blackjack, created from their id and with the default env_config['render']; got "
                f"id={shown(env.env_config['id'])} and render={shown(env.env_config['render'])}"
            )
        self._env = env

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Look up the frame and return the best action; ``agent_state`` is the number of turns so far."""
        text = messages[-1]["content"]
        turn: int = 0 if agent_state is None or text.startswith(NEW_GAME) else agent_state
        frame = text.removeprefix(NEW_GAME)
        env = self._env
        exact = env.exact_values()
        if exact is not None and frame not in exact.frames and env.has_maps:
            exact = env.exact_values(map_from_frame(frame))  # the task's custom map
        if exact is None or frame not in exact.frames:
            raise AgentError(
                f"no values are known for the observation {shown(frame)}: it must be an unmodified frame of the "
                "player's environment"
            )
        turns_left = max(1, env.horizon - turn)
        index = int(exact.values.policy[turns_left, exact.frames[frame]])
        return f"[{env.actions.name_of(env.actions.values[index])}]", turn + 1
