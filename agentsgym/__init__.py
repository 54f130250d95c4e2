"""Train language-model agents over many turns.

The public names stand here and are imported when they are first used, so that ``import agentsgym`` stays fast and
needs no torch.

    >>> import agentsgym
    >>> agentsgym.StopReason.MAX_TURNS.truncated
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.agents.base import Agent, AsyncAgent
    from agentsgym.agents.direct import DirectOutputAgent
    from agentsgym.agents.exploring import ExploringAgent
    from agentsgym.agents.openai import OpenAIAgent
    from agentsgym.agents.policy.agent import PolicyAgent
    from agentsgym.agents.policy.copied import CopiedPolicyAgent
    from agentsgym.agents.policy.sampling import SamplingParams
    from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.credit.traits import estimator_traits
    from agentsgym.envs.ALFWorld import ALFWorldEnv
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.check.run import check_env
    from agentsgym.envs.datasets.mix import mix
    from agentsgym.envs.datasets.registry import make, register
    from agentsgym.envs.Gymnasium import GymnasiumEnv
    from agentsgym.envs.OpenEnv import OpenEnvEnv, OpenEnvServer, register_server
    from agentsgym.envs.PriceList import PriceListEnv
    from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
    from agentsgym.envs.ScienceWorld import ScienceWorldEnv
    from agentsgym.envs.Search import SearchEnv
    from agentsgym.envs.TextArena import TextArenaEnv
    from agentsgym.envs.TextWorld import TextWorldEnv
    from agentsgym.envs.Tools import McpServer, SessionTools, ToolEnv, ToolResult, register_tools
    from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
    from agentsgym.errors import (
        AgentError,
        AgentsGymError,
        CheckpointError,
        ConfigError,
        ContractError,
        EnvError,
        EpisodeError,
        MissingDependencyError,
        NonFiniteError,
        StoreError,
        TaskError,
        TemplateError,
        TooManyFailuresError,
    )
    from agentsgym.evaluation.mixed import evaluate_mixed
    from agentsgym.evaluation.run import evaluate
    from agentsgym.failure_policy import FailurePolicy
    from agentsgym.fields import Field
    from agentsgym.recipes.recipe import Recipe
    from agentsgym.recipes.run import TrainingRun
    from agentsgym.recipes.train import train
    from agentsgym.record_audit import audit
    from agentsgym.recorded.rows import trajectories_from_messages
    from agentsgym.rollouts.process_pool import EnvProcessPool
    from agentsgym.rollouts.thread_pool import EnvThreadPool
    from agentsgym.store.reader import RolloutStore
    from agentsgym.tiny import tiny_policy
    from agentsgym.training.callbacks import LearningCurve
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.curriculum import Curriculum
    from agentsgym.training.drift import logprob_gap
    from agentsgym.training.imitate import imitate
    from agentsgym.training.lifecycle.preemption import Preempted
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.types import Action, Message, StopReason, ToolCall, Trajectory, Turn, TurnRequest

__version__ = "0.1.0"

__all__ = [
    "ALFWorldEnv",
    "Action",
    "Agent",
    "AgentError",
    "AgentsGymError",
    "AsyncAgent",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "CopiedPolicyAgent",
    "Curriculum",
    "DirectOutputAgent",
    "EnvError",
    "EnvProcessPool",
    "EnvThreadPool",
    "EpisodeError",
    "ExploringAgent",
    "FailurePolicy",
    "Field",
    "GRPOEnvConfig",
    "GRPOEnvTrainer",
    "GymnasiumEnv",
    "LearningCurve",
    "McpServer",
    "Message",
    "MissingDependencyError",
    "MultistepEnv",
    "NonFiniteError",
    "OpenAIAgent",
    "OpenEnvEnv",
    "OpenEnvServer",
    "PolicyAgent",
    "Preempted",
    "PriceListEnv",
    "RandomAgent",
    "ReasoningEvalsEnv",
    "Recipe",
    "RolloutStore",
    "SamplingParams",
    "ScienceWorldEnv",
    "ScoredRollout",
    "ScriptedAgent",
    "SearchEnv",
    "SessionTools",
    "StopReason",
    "StoreError",
    "TaskError",
    "TemplateError",
    "TextArenaEnv",
    "TextWorldEnv",
    "TooManyFailuresError",
    "ToolCall",
    "ToolEnv",
    "ToolResult",
    "TrainingRun",
    "Trajectory",
    "Turn",
    "TurnRequest",
    "TwentyQuestionsEnv",
    "__version__",
    "audit",
    "check_env",
    "estimator_traits",
    "evaluate",
    "evaluate_mixed",
    "imitate",
    "logprob_gap",
    "make",
    "mix",
    "register",
    "register_server",
    "register_tools",
    "tiny_policy",
    "train",
    "trajectories_from_messages",
]

_HOMES = {
    "agents.base": ("Agent", "AsyncAgent"),
    "agents.direct": ("DirectOutputAgent",),
    "agents.exploring": ("ExploringAgent",),
    "agents.openai": ("OpenAIAgent",),
    "agents.policy.agent": ("PolicyAgent",),
    "agents.policy.copied": ("CopiedPolicyAgent",),
    "agents.policy.sampling": ("SamplingParams",),
    "agents.scripted": ("RandomAgent", "ScriptedAgent"),
    "credit.scored": ("ScoredRollout",),
    "credit.traits": ("estimator_traits",),
    "envs.base": ("MultistepEnv",),
    "envs.check.run": ("check_env",),
    "envs.datasets.mix": ("mix",),
    "envs.datasets.registry": ("make", "register"),
    "envs.ALFWorld": ("ALFWorldEnv",),
    "envs.Gymnasium": ("GymnasiumEnv",),
    "envs.OpenEnv": ("OpenEnvEnv", "OpenEnvServer", "register_server"),
    "envs.PriceList": ("PriceListEnv",),
    "envs.ReasoningEvals": ("ReasoningEvalsEnv",),
    "envs.ScienceWorld": ("ScienceWorldEnv",),
    "envs.Search": ("SearchEnv",),
    "envs.TextArena": ("TextArenaEnv",),
    "envs.TextWorld": ("TextWorldEnv",),
    "envs.Tools": ("McpServer", "SessionTools", "ToolEnv", "ToolResult", "register_tools"),
    "envs.TwentyQuestions": ("TwentyQuestionsEnv",),
    "errors": (
        "AgentError",
        "AgentsGymError",
        "CheckpointError",
        "ConfigError",
        "ContractError",
        "EnvError",
        "EpisodeError",
        "MissingDependencyError",
        "NonFiniteError",
        "StoreError",
        "TaskError",
        "TemplateError",
        "TooManyFailuresError",
    ),
    "evaluation.mixed": ("evaluate_mixed",),
    "evaluation.run": ("evaluate",),
    "failure_policy": ("FailurePolicy",),
    "fields": ("Field",),
    "rollouts.thread_pool": ("EnvThreadPool",),
    "rollouts.process_pool": ("EnvProcessPool",),
    "recipes.recipe": ("Recipe",),
    "recipes.train": ("train",),
    "record_audit": ("audit",),
    "recorded.rows": ("trajectories_from_messages",),
    "store.reader": ("RolloutStore",),
    "tiny": ("tiny_policy",),
    "training.callbacks": ("LearningCurve",),
    "training.curriculum": ("Curriculum",),
    "training.config": ("GRPOEnvConfig",),
    "training.drift": ("logprob_gap",),
    "training.imitate": ("imitate",),
    "training.lifecycle.preemption": ("Preempted",),
    "recipes.run": ("TrainingRun",),
    "training.trainer": ("GRPOEnvTrainer",),
    "types": ("Action", "Message", "StopReason", "ToolCall", "Trajectory", "Turn", "TurnRequest"),
}

__getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
