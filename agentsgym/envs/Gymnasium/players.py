"""Players to measure against and to learn from."""

from __future__ import annotations

from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import RandomAgent
from agentsgym.envs.Gymnasium.described import rows_of_frame
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

    It reads the frames and nothing else of the environment.

    Args:
        env: An environment whose exact values are known.
        seed: An unused seed, since the player is deterministic.

    Raises:
        ConfigError: The exact values are unknown.
    """

    def __init__(self, env: GymnasiumEnv, seed: int = 0) -> None:
        exact = env.exact()
        if exact is None or not exact.frames:
            raise ConfigError(
                "OptimalPlayer needs a game whose exact values are known: FrozenLake, Taxi, CliffWalking or Blackjack, "
                f"made by its id and with default rendering, got {shown(env.env_config['id'])}"
            )
        self._env = env

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Look the frame up; ``agent_state`` is the number of turns so far."""
        text = messages[-1]["content"]
        turn: int = 0 if agent_state is None or text.startswith(NEW_GAME) else agent_state
        frame = text.removeprefix(NEW_GAME)
        env = self._env
        exact = env.exact()
        if exact is not None and frame not in exact.frames and env.has_maps:
            exact = env.exact(rows_of_frame(frame))  # the task's custom map
        if exact is None or frame not in exact.frames:
            raise AgentError(f"no values are known for the state shown as {shown(frame)}")
        left = max(1, env.horizon - turn)
        index = int(exact.values.policy[left, exact.frames[frame]])
        return f"[{env.actions.name_of(env.actions.values[index])}]", turn + 1
