"""TextWorld: text quests in worlds that are generated from a seed."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.TextWorld.env import TextWorldEnv as TextWorldEnv

SPEC = EnvSpec(
    packages=("textworld", "jericho"),
    extra="textworld",
    game_key="kind",
    games="agentsgym.envs.TextWorld.env:games",
    random="agentsgym.envs.shared.text_worlds:RandomPlayer",
    reference="agentsgym.envs.shared.text_worlds:ReferencePlayer",
    imitation="agentsgym.envs.shared.text_worlds:ImitationPlayer",
)
__getattr__, __all__ = lazy(__name__, {".env": ["TextWorldEnv"]})
