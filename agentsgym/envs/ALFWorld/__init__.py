"""ALFWorld: household tasks in text, published or generated."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.ALFWorld.env import ALFWorldEnv as ALFWorldEnv
    from agentsgym.envs.ALFWorld.players import ImitationPlayer as ImitationPlayer
    from agentsgym.envs.ALFWorld.players import ReferencePlayer as ReferencePlayer
    from agentsgym.envs.shared.text_worlds import RandomPlayer as RandomPlayer

SPEC = EnvSpec(
    packages=("alfworld", "textworld"),
    extra="alfworld",
    random="agentsgym.envs.shared.text_worlds:RandomPlayer",
    reference="agentsgym.envs.ALFWorld.players:ReferencePlayer",
    imitation="agentsgym.envs.ALFWorld.players:ImitationPlayer",
)
__getattr__, __all__ = lazy(
    __name__,
    {
        ".env": ["ALFWorldEnv"],
        ".players": ["ImitationPlayer", "ReferencePlayer"],
        "agentsgym.envs.shared.text_worlds": ["RandomPlayer"],
    },
)
