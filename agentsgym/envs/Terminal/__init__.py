"""The terminal: tasks that are solved with commands of a shell, each episode in a separate folder."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Terminal.env import TerminalEnv as TerminalEnv
    from agentsgym.envs.Terminal.players import RandomPlayer as RandomPlayer
    from agentsgym.envs.Terminal.players import ReferencePlayer as ReferencePlayer

SPEC = EnvSpec(
    dataset_key="families",
    games="agentsgym.envs.Terminal.tasks:family_notes",
    has_only_listed_games=True,
    random="agentsgym.envs.Terminal.players:RandomPlayer",
    reference="agentsgym.envs.Terminal.players:ReferencePlayer",
)
__getattr__, __all__ = lazy(__name__, {".env": ["TerminalEnv"], ".players": ["RandomPlayer", "ReferencePlayer"]})
