"""Exact values of some of TextArena's games, and the players that reach them."""

from agentsgym.envs.TextArena.references.base import Reference, ReferencePlayer
from agentsgym.envs.TextArena.references.catalogue import REFERENCES, anchors_of, optimal_player, reference_for

__all__ = ["REFERENCES", "Reference", "ReferencePlayer", "anchors_of", "optimal_player", "reference_for"]
