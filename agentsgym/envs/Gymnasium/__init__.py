"""Any Gymnasium environment with discrete actions, played in text."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Gymnasium.env import GymnasiumEnv
    from agentsgym.envs.Gymnasium.players import OptimalPlayer, RandomPlayer

__all__ = ["GymnasiumEnv", "OptimalPlayer", "RandomPlayer"]

SPEC = EnvSpec(
    packages=("gymnasium",),
    extra="gymnasium",
    game_key="id",
    games="agentsgym.envs.Gymnasium.creation:GAMES",
    random="agentsgym.envs.Gymnasium.players:RandomPlayer",
    reference="agentsgym.envs.Gymnasium.players:OptimalPlayer",
)
__getattr__ = lazy(__name__)
