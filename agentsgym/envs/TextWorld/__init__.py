"""TextWorld: quests in worlds that are made from a seed, told in text."""

from agentsgym.envs.shared.text_worlds.players import ImitationPlayer, RandomPlayer, ReferencePlayer
from agentsgym.envs.TextWorld.env import TextWorldEnv

__all__ = ["ImitationPlayer", "RandomPlayer", "ReferencePlayer", "TextWorldEnv"]
