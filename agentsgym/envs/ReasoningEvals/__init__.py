"""Reasoning: questions with verifiable answers, from any dataset or generated without limit."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.ReasoningEvals.env import ReasoningEvalsEnv as ReasoningEvalsEnv
    from agentsgym.envs.ReasoningEvals.generated import UNSOUND as UNSOUND
    from agentsgym.envs.ReasoningEvals.generated import WITHOUT_SOLUTION as WITHOUT_SOLUTION
    from agentsgym.envs.ReasoningEvals.generated import task_names as task_names

SPEC = EnvSpec(extra="reasoning", dataset_key="task")
__getattr__, __all__ = lazy(
    __name__, {".env": ["ReasoningEvalsEnv"], ".generated": ["UNSOUND", "WITHOUT_SOLUTION", "task_names"]}
)
