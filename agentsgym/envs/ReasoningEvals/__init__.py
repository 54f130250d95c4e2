"""Reasoning: questions with answers that can be checked, of any data set or made without end."""

from agentsgym.envs.ReasoningEvals.env import ReasoningEvalsEnv
from agentsgym.envs.ReasoningEvals.generated import UNSOUND, WITHOUT_SOLUTION, task_names

__all__ = ["UNSOUND", "WITHOUT_SOLUTION", "ReasoningEvalsEnv", "task_names"]
