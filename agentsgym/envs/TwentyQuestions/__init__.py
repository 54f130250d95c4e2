"""Twenty Questions: identify the gamemaster's secret object by asking questions."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.TwentyQuestions.agent_gamemaster import AgentGamemaster
    from agentsgym.envs.TwentyQuestions.env import TwentyQuestionsEnv
    from agentsgym.envs.TwentyQuestions.knowledge import DEMO_OBJECTS, DEMO_PROPERTIES
    from agentsgym.envs.TwentyQuestions.players import (
        GreedyPlayer,
        ImitationPlayer,
        RandomPlayer,
        lower_bound_questions,
    )

__all__ = [
    "DEMO_OBJECTS",
    "DEMO_PROPERTIES",
    "AgentGamemaster",
    "GreedyPlayer",
    "ImitationPlayer",
    "RandomPlayer",
    "TwentyQuestionsEnv",
    "lower_bound_questions",
]

SPEC = EnvSpec(
    random="agentsgym.envs.TwentyQuestions.players:RandomPlayer",
    reference="agentsgym.envs.TwentyQuestions.players:GreedyPlayer",
    imitation="agentsgym.envs.TwentyQuestions.players:ImitationPlayer",
    anchors="agentsgym.envs.TwentyQuestions.players:anchors_of",
)
__getattr__ = lazy(__name__)
