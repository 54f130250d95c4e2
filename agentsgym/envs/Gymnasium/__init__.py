"""Any Gymnasium environment with discrete actions, played in text."""

from agentsgym.envs.Gymnasium.env import GymnasiumEnv
from agentsgym.envs.Gymnasium.players import OptimalPlayer, RandomPlayer

__all__ = ["GymnasiumEnv", "OptimalPlayer", "RandomPlayer"]
