"""TextArena: word, board, card and negotiation games, alone, against others, or against oneself."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec
from agentsgym.envs.TextArena.catalogue import GameEntry as GameEntry
from agentsgym.envs.TextArena.catalogue import catalogue as catalogue  # the module of this name must not replace it

if TYPE_CHECKING:
    from agentsgym.envs.opponents import register_player as register_player
    from agentsgym.envs.TextArena.env import TextArenaEnv as TextArenaEnv
    from agentsgym.envs.TextArena.players import LegalAgent as LegalAgent

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
__getattr__, __all__ = lazy(
    __name__,
    {
        ".catalogue": ["GameEntry", "catalogue"],
        ".env": ["TextArenaEnv"],
        ".players": ["LegalAgent"],
        "..opponents": ["register_player"],
    },
)
