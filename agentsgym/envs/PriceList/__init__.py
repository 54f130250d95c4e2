"""The price list: questions that require look-ups in a table and arithmetic, each done by a tool."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.PriceList.env import GOODS, PriceListEnv
    from agentsgym.envs.PriceList.players import ImitationPlayer, RandomPlayer, ReferencePlayer

__all__ = ["GOODS", "ImitationPlayer", "PriceListEnv", "RandomPlayer", "ReferencePlayer"]

SPEC = EnvSpec(
    random="agentsgym.envs.PriceList.players:RandomPlayer",
    reference="agentsgym.envs.PriceList.players:ReferencePlayer",
    imitation="agentsgym.envs.PriceList.players:ImitationPlayer",
)
__getattr__ = lazy(__name__)
