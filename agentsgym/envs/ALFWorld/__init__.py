"""ALFWorld: household tasks in text, of the published data or generated."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy  # the engine's processes import this package, and nothing of the environment

if TYPE_CHECKING:
    from agentsgym.envs.ALFWorld.env import ALFWorldEnv
    from agentsgym.envs.ALFWorld.players import ImitationPlayer, RandomPlayer, ReferencePlayer

__all__ = ["ALFWorldEnv", "ImitationPlayer", "RandomPlayer", "ReferencePlayer"]

_HOMES = {"env": ("ALFWorldEnv",), "players": ("ImitationPlayer", "RandomPlayer", "ReferencePlayer")}
__getattr__ = lazy(__name__, _HOMES)
