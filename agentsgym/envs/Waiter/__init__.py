"""The waiter: orders to remember while the history is replaced by notes."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Waiter.env import WaiterEnv as WaiterEnv
    from agentsgym.envs.Waiter.players import ImitationPlayer as ImitationPlayer
    from agentsgym.envs.Waiter.players import RandomPlayer as RandomPlayer
    from agentsgym.envs.Waiter.players import ReferencePlayer as ReferencePlayer

SPEC = EnvSpec(
    random="agentsgym.envs.Waiter.players:RandomPlayer",
    reference="agentsgym.envs.Waiter.players:ReferencePlayer",
    imitation="agentsgym.envs.Waiter.players:ImitationPlayer",
)
__getattr__, __all__ = lazy(
    __name__, {".env": ["WaiterEnv"], ".players": ["ImitationPlayer", "RandomPlayer", "ReferencePlayer"]}
)
