"""Search: answer questions by searching a corpus, one fact at a time."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Search.corpus import Passage
    from agentsgym.envs.Search.env import SearchEnv
    from agentsgym.envs.Search.players import RandomPlayer, ReferencePlayer
    from agentsgym.envs.Search.world import World

__all__ = ["Passage", "RandomPlayer", "ReferencePlayer", "SearchEnv", "World"]

SPEC = EnvSpec(
    extra="search",
    random="agentsgym.envs.Search.players:RandomPlayer",
    reference="agentsgym.envs.Search.players:ReferencePlayer",
)
__getattr__ = lazy(__name__)
