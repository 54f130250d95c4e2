"""ScienceWorld: experiments of elementary-school science in a simulated house, told in text."""

from agentsgym.envs.ScienceWorld.env import ScienceWorldEnv
from agentsgym.envs.shared.text_worlds.players import RandomPlayer, ReferencePlayer

__all__ = ["RandomPlayer", "ReferencePlayer", "ScienceWorldEnv"]
