"""Search: answer questions by searching a corpus, one fact after the other."""

from agentsgym.envs.Search.corpus import Passage
from agentsgym.envs.Search.env import SearchEnv
from agentsgym.envs.Search.players import RandomPlayer, ReferencePlayer
from agentsgym.envs.Search.world import World

__all__ = ["Passage", "RandomPlayer", "ReferencePlayer", "SearchEnv", "World"]
