"""The waiter: orders to remember while the history is replaced by notes."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Waiter.env import WaiterEnv
    from agentsgym.envs.Waiter.players import ImitationPlayer, RandomPlayer, ReferencePlayer

__all__ = ["ImitationPlayer", "RandomPlayer", "ReferencePlayer", "WaiterEnv"]

SPEC = EnvSpec(
    random="agentsgym.envs.Waiter.players:RandomPlayer",
    reference="agentsgym.envs.Waiter.players:ReferencePlayer",
    imitation="agentsgym.envs.Waiter.players:ImitationPlayer",
)
__getattr__ = lazy(__name__)
