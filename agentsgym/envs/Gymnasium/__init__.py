"""Any Gymnasium environment with discrete actions, played in text."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Gymnasium.env import GymnasiumEnv as GymnasiumEnv
    from agentsgym.envs.Gymnasium.players import OptimalPlayer as OptimalPlayer
    from agentsgym.envs.Gymnasium.players import RandomPlayer as RandomPlayer

SPEC = EnvSpec(
    packages=("gymnasium",),
    extra="gymnasium",
    game_key="id",
    games="agentsgym.envs.Gymnasium.creation:GAMES",
    random="agentsgym.envs.Gymnasium.players:RandomPlayer",
    reference="agentsgym.envs.Gymnasium.players:OptimalPlayer",
)
__getattr__, __all__ = lazy(__name__, {".env": ["GymnasiumEnv"], ".players": ["OptimalPlayer", "RandomPlayer"]})
