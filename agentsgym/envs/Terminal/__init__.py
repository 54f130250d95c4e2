"""The terminal: tasks that are solved with commands of a shell, each episode in a separate folder."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Terminal.env import TerminalEnv
    from agentsgym.envs.Terminal.players import RandomPlayer, ReferencePlayer

__all__ = ["RandomPlayer", "ReferencePlayer", "TerminalEnv"]

SPEC = EnvSpec(
    dataset_key="families",
    games="agentsgym.envs.Terminal.tasks:family_notes",
    has_only_listed_games=True,
    random="agentsgym.envs.Terminal.players:RandomPlayer",
    reference="agentsgym.envs.Terminal.players:ReferencePlayer",
)
__getattr__ = lazy(__name__)
