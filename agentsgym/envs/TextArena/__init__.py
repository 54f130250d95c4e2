"""TextArena: word, board, card and negotiation games, alone, against others, or against oneself."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec
from agentsgym.envs.TextArena.catalogue import GameEntry, catalogue

if TYPE_CHECKING:
    from agentsgym.envs.TextArena.env import TextArenaEnv
    from agentsgym.envs.TextArena.players import LegalAgent, register_player

__all__ = ["GameEntry", "LegalAgent", "TextArenaEnv", "catalogue", "register_player"]

SPEC = EnvSpec(
    packages=("textarena",),
    extra="textarena",
    game_key="game",
    games="agentsgym.envs.TextArena.catalogue:games",
    has_only_listed_games=True,
    random="agentsgym.envs.TextArena.players:LegalAgent",
    reference="agentsgym.envs.TextArena.references:optimal_player",
    anchors="agentsgym.envs.TextArena.references:anchors_of",
)
__getattr__ = lazy(__name__)
