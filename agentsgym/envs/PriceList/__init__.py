"""The price list: questions that require look-ups in a table and arithmetic, each done by a tool."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.PriceList.env import GOODS as GOODS
    from agentsgym.envs.PriceList.env import PriceListEnv as PriceListEnv
    from agentsgym.envs.PriceList.players import ImitationPlayer as ImitationPlayer
    from agentsgym.envs.PriceList.players import RandomPlayer as RandomPlayer
    from agentsgym.envs.PriceList.players import ReferencePlayer as ReferencePlayer

SPEC = EnvSpec(
    random="agentsgym.envs.PriceList.players:RandomPlayer",
    reference="agentsgym.envs.PriceList.players:ReferencePlayer",
    imitation="agentsgym.envs.PriceList.players:ImitationPlayer",
)
__getattr__, __all__ = lazy(
    __name__, {".env": ["GOODS", "PriceListEnv"], ".players": ["ImitationPlayer", "RandomPlayer", "ReferencePlayer"]}
)
