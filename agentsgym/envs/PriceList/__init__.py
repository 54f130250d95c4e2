"""The price list: questions that take look-ups in a table and arithmetic, each by a tool."""

from agentsgym.envs.PriceList.env import GOODS, PriceListEnv
from agentsgym.envs.PriceList.players import ImitationPlayer, RandomPlayer, ReferencePlayer

__all__ = ["GOODS", "ImitationPlayer", "PriceListEnv", "RandomPlayer", "ReferencePlayer"]
