"""Twenty Questions: identify the gamemaster's secret object by asking questions."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.TwentyQuestions.agent_gamemaster import AgentGamemaster as AgentGamemaster
    from agentsgym.envs.TwentyQuestions.env import TwentyQuestionsEnv as TwentyQuestionsEnv
    from agentsgym.envs.TwentyQuestions.knowledge import DEMO_OBJECTS as DEMO_OBJECTS
    from agentsgym.envs.TwentyQuestions.knowledge import DEMO_PROPERTIES as DEMO_PROPERTIES
    from agentsgym.envs.TwentyQuestions.players import GreedyPlayer as GreedyPlayer
    from agentsgym.envs.TwentyQuestions.players import ImitationPlayer as ImitationPlayer
    from agentsgym.envs.TwentyQuestions.players import RandomPlayer as RandomPlayer
    from agentsgym.envs.TwentyQuestions.players import lower_bound_questions as lower_bound_questions

SPEC = EnvSpec(
    games="agentsgym.envs.TwentyQuestions.protocols:variants",
    fingerprint="agentsgym.envs.TwentyQuestions.protocols:fingerprint",
    random="agentsgym.envs.TwentyQuestions.players:RandomPlayer",
    reference="agentsgym.envs.TwentyQuestions.players:GreedyPlayer",
    imitation="agentsgym.envs.TwentyQuestions.players:ImitationPlayer",
    anchors="agentsgym.envs.TwentyQuestions.players:anchors_of",
)
__getattr__, __all__ = lazy(
    __name__,
    {
        ".agent_gamemaster": ["AgentGamemaster"],
        ".env": ["TwentyQuestionsEnv"],
        ".knowledge": ["DEMO_OBJECTS", "DEMO_PROPERTIES"],
        ".players": ["GreedyPlayer", "ImitationPlayer", "RandomPlayer", "lower_bound_questions"],
    },
)
