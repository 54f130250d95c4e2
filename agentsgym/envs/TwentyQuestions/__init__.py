"""Twenty Questions: find out by questions what object the gamemaster thinks of."""

from agentsgym.envs.TwentyQuestions.env import TwentyQuestionsEnv
from agentsgym.envs.TwentyQuestions.knowledge import DEMO_OBJECTS, DEMO_PROPERTIES
from agentsgym.envs.TwentyQuestions.players import GreedyPlayer, ImitationPlayer, RandomPlayer, lower_bound_questions

__all__ = [
    "DEMO_OBJECTS",
    "DEMO_PROPERTIES",
    "GreedyPlayer",
    "ImitationPlayer",
    "RandomPlayer",
    "TwentyQuestionsEnv",
    "lower_bound_questions",
]
