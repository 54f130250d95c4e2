"""Reasoning: questions with verifiable answers, from any dataset or generated without limit."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.ReasoningEvals.env import ReasoningEvalsEnv
    from agentsgym.envs.ReasoningEvals.generated import UNSOUND, WITHOUT_SOLUTION, task_names

__all__ = ["UNSOUND", "WITHOUT_SOLUTION", "ReasoningEvalsEnv", "task_names"]

SPEC = EnvSpec(extra="reasoning", dataset_key="task")
__getattr__ = lazy(__name__)
