"""ScienceWorld: text experiments of elementary-school science in a simulated house."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.ScienceWorld.env import ScienceWorldEnv as ScienceWorldEnv

SPEC = EnvSpec(
    packages=("scienceworld", "py4j"),
    extra="scienceworld",
    dataset_key="tasks",
    random="agentsgym.envs.shared.text_worlds:RandomPlayer",
    reference="agentsgym.envs.shared.text_worlds:ReferencePlayer",
    imitation="agentsgym.envs.shared.text_worlds:ImitationPlayer",
)
__getattr__, __all__ = lazy(__name__, {".env": ["ScienceWorldEnv"]})
