"""Train language-model agents over many turns.

Public names are imported when they are first used, so ``import agentsgym`` is fast and does not
import torch.

    >>> import agentsgym
    >>> agentsgym.StopReason.MAX_TURNS.truncated
    True
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from agentsgym._lazy import lazy
from agentsgym.removed import RemovedModules

if TYPE_CHECKING:
    from agentsgym.agents.base import Agent, AsyncAgent
    from agentsgym.agents.direct import DirectOutputAgent
    from agentsgym.agents.exploring import ExploringAgent
    from agentsgym.agents.openai import OpenAIAgent
    from agentsgym.agents.policy.agent import PolicyAgent
    from agentsgym.agents.policy.copied import CopiedPolicyAgent
    from agentsgym.agents.policy.packaged import packaged_model
    from agentsgym.agents.policy.sampling import SamplingParams
    from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.credit.traits import estimator_traits
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.check.run import check_env
    from agentsgym.envs.datasets.mix import mix
    from agentsgym.envs.datasets.registry import make, register
    from agentsgym.errors import (
        AgentError,
        AgentsGymError,
        CheckpointError,
        ConfigError,
        ContractError,
        EnvError,
        EpisodeError,
        JudgeError,
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
    from agentsgym.judging.judge import Judge
    from agentsgym.judging.rubric import Criterion
    from agentsgym.observers.learning_curve import LearningCurve
    from agentsgym.recipes.recipe import Recipe
    from agentsgym.recipes.run import TrainingRun
    from agentsgym.recipes.train import train
    from agentsgym.record_audit import audit
    from agentsgym.recorded.messages import trajectories_from_messages
    from agentsgym.rollouts.process_pool import EnvProcessPool
    from agentsgym.rollouts.thread_pool import EnvThreadPool
    from agentsgym.serving.policy import serve_policy
    from agentsgym.store.reader import RolloutStore
    from agentsgym.tiny import tiny_policy
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.drift import logprob_gap
    from agentsgym.training.lifecycle.preemption import Preempted
    from agentsgym.training.objectives.demonstrations import Demonstrations
    from agentsgym.training.objectives.distillation import Distillation
    from agentsgym.training.selection.curriculum import Curriculum
    from agentsgym.training.selection.imitate import imitate
    from agentsgym.training.selection.league import League
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.types import Action, Message, StopReason, ToolCall, Trajectory, Turn, TurnRequest

__version__ = "0.3.0"

__all__ = [
    "Action",
    "Agent",
    "AgentError",
    "AgentsGymError",
    "AsyncAgent",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "CopiedPolicyAgent",
    "Criterion",
    "Curriculum",
    "Demonstrations",
    "DirectOutputAgent",
    "Distillation",
    "EnvError",
    "EnvProcessPool",
    "EnvThreadPool",
    "EpisodeError",
    "ExploringAgent",
    "FailurePolicy",
    "Field",
    "GRPOEnvConfig",
    "GRPOEnvTrainer",
    "Judge",
    "JudgeError",
    "League",
    "LearningCurve",
    "Message",
    "MissingDependencyError",
    "MultistepEnv",
    "NonFiniteError",
    "OpenAIAgent",
    "PolicyAgent",
    "Preempted",
    "RandomAgent",
    "Recipe",
    "RolloutStore",
    "SamplingParams",
    "ScoredRollout",
    "ScriptedAgent",
    "StopReason",
    "StoreError",
    "TaskError",
    "TemplateError",
    "TooManyFailuresError",
    "ToolCall",
    "TrainingRun",
    "Trajectory",
    "Turn",
    "TurnRequest",
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
    "packaged_model",
    "register",
    "serve_policy",
    "tiny_policy",
    "train",
    "trajectories_from_messages",
]


def _find_moved(name: str) -> Any:
    from agentsgym.envs import __all__ as names  # noqa: PLC0415  # needed only for an unknown name

    if name in names:
        raise AttributeError(f"module 'agentsgym' has no attribute {name!r}: it is agentsgym.envs.{name}")
    raise AttributeError(f"module 'agentsgym' has no attribute {name!r}")


__getattr__ = lazy(__name__, _find_moved)
sys.meta_path.append(RemovedModules)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
