"""ALFWorld: household tasks in text, published or generated."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.ALFWorld.env import ALFWorldEnv
    from agentsgym.envs.ALFWorld.players import ImitationPlayer, ReferencePlayer
    from agentsgym.envs.shared.text_worlds.players import RandomPlayer

__all__ = ["ALFWorldEnv", "ImitationPlayer", "RandomPlayer", "ReferencePlayer"]

SPEC = EnvSpec(
    packages=("alfworld", "textworld"),
    extra="alfworld",
    random="agentsgym.envs.shared.text_worlds.players:RandomPlayer",
    reference="agentsgym.envs.ALFWorld.players:ReferencePlayer",
    imitation="agentsgym.envs.ALFWorld.players:ImitationPlayer",
)
__getattr__ = lazy(__name__)
