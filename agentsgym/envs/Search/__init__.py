"""Search: answer questions by searching a corpus, one fact at a time."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Search.corpus import Passage as Passage
    from agentsgym.envs.Search.env import SearchEnv as SearchEnv
    from agentsgym.envs.Search.players import RandomPlayer as RandomPlayer
    from agentsgym.envs.Search.players import ReferencePlayer as ReferencePlayer
    from agentsgym.envs.Search.world import World as World

SPEC = EnvSpec(
    extra="search",
    random="agentsgym.envs.Search.players:RandomPlayer",
    reference="agentsgym.envs.Search.players:ReferencePlayer",
)
__getattr__, __all__ = lazy(
    __name__,
    {
        ".corpus": ["Passage"],
        ".env": ["SearchEnv"],
        ".players": ["RandomPlayer", "ReferencePlayer"],
        ".world": ["World"],
    },
)
