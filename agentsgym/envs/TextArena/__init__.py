"""TextArena: word, board, card and negotiation games, alone, against others, or against oneself."""

from agentsgym.envs.TextArena.catalogue import GameEntry, catalogue
from agentsgym.envs.TextArena.env import TextArenaEnv
from agentsgym.envs.TextArena.players import LegalAgent, register_player

__all__ = ["GameEntry", "LegalAgent", "TextArenaEnv", "catalogue", "register_player"]
