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
    from agentsgym.agents.base import Agent as Agent
    from agentsgym.agents.base import AsyncAgent as AsyncAgent
    from agentsgym.agents.direct import DirectOutputAgent as DirectOutputAgent
    from agentsgym.agents.exploring import ExploringAgent as ExploringAgent
    from agentsgym.agents.openai import OpenAIAgent as OpenAIAgent
    from agentsgym.agents.policy.agent import CopiedPolicyAgent as CopiedPolicyAgent
    from agentsgym.agents.policy.agent import PolicyAgent as PolicyAgent
    from agentsgym.agents.policy.packaged import packaged_model as packaged_model
    from agentsgym.agents.policy.sampling import SamplingParams as SamplingParams
    from agentsgym.agents.scripted import RandomAgent as RandomAgent
    from agentsgym.agents.scripted import ScriptedAgent as ScriptedAgent
    from agentsgym.credit.scored import ScoredRollout as ScoredRollout
    from agentsgym.credit.traits import estimator_traits as estimator_traits
    from agentsgym.envs.base import MultistepEnv as MultistepEnv
    from agentsgym.envs.check.run import check_env as check_env
    from agentsgym.envs.datasets.environments import make as make
    from agentsgym.envs.datasets.environments import register as register
    from agentsgym.envs.datasets.mix import mix as mix
    from agentsgym.errors import AgentError as AgentError
    from agentsgym.errors import AgentsGymError as AgentsGymError
    from agentsgym.errors import CheckpointError as CheckpointError
    from agentsgym.errors import ConfigError as ConfigError
    from agentsgym.errors import ContractError as ContractError
    from agentsgym.errors import EnvError as EnvError
    from agentsgym.errors import EpisodeError as EpisodeError
    from agentsgym.errors import JudgeError as JudgeError
    from agentsgym.errors import MissingDependencyError as MissingDependencyError
    from agentsgym.errors import NonFiniteError as NonFiniteError
    from agentsgym.errors import StoreError as StoreError
    from agentsgym.errors import TaskError as TaskError
    from agentsgym.errors import TemplateError as TemplateError
    from agentsgym.errors import TooManyFailuresError as TooManyFailuresError
    from agentsgym.evaluation.mixed import evaluate_mixed as evaluate_mixed
    from agentsgym.evaluation.run import evaluate as evaluate
    from agentsgym.failures import FailurePolicy as FailurePolicy
    from agentsgym.fields import Field as Field
    from agentsgym.judging.judge import Judge as Judge
    from agentsgym.judging.rubric import Criterion as Criterion
    from agentsgym.observers.learning_curve import LearningCurve as LearningCurve
    from agentsgym.recipes.recipe import Recipe as Recipe
    from agentsgym.recipes.run import TrainingRun as TrainingRun
    from agentsgym.recipes.train import train as train
    from agentsgym.record_audit import audit as audit
    from agentsgym.recorded.messages import trajectories_from_messages as trajectories_from_messages
    from agentsgym.rollouts.process_pool import EnvProcessPool as EnvProcessPool
    from agentsgym.rollouts.thread_pool import EnvThreadPool as EnvThreadPool
    from agentsgym.serving.policy import serve_policy as serve_policy
    from agentsgym.store.reader import RolloutStore as RolloutStore
    from agentsgym.tiny import tiny_policy as tiny_policy
    from agentsgym.training.config import GRPOEnvConfig as GRPOEnvConfig
    from agentsgym.training.drift import logprob_gap as logprob_gap
    from agentsgym.training.lifecycle.preemption import Preempted as Preempted
    from agentsgym.training.objectives.demonstrations import Demonstrations as Demonstrations
    from agentsgym.training.objectives.distillation import Distillation as Distillation
    from agentsgym.training.selection.curriculum import Curriculum as Curriculum
    from agentsgym.training.selection.imitate import imitate as imitate
    from agentsgym.training.selection.league import League as League
    from agentsgym.training.trainer import GRPOEnvTrainer as GRPOEnvTrainer
    from agentsgym.types import Action as Action
    from agentsgym.types import Message as Message
    from agentsgym.types import StopReason as StopReason
    from agentsgym.types import ToolCall as ToolCall
    from agentsgym.types import Trajectory as Trajectory
    from agentsgym.types import Turn as Turn
    from agentsgym.types import TurnRequest as TurnRequest

__version__ = "0.3.0"


def _find_moved(name: str) -> Any:
    from agentsgym.envs import __all__ as names  # noqa: PLC0415  # needed only for an unknown name

    if name in names:
        raise AttributeError(f"module 'agentsgym' has no attribute {name!r}: it is agentsgym.envs.{name}")
    raise AttributeError(f"module 'agentsgym' has no attribute {name!r}")


__getattr__, __all__ = lazy(
    __name__,
    {
        ".agents.base": ["Agent", "AsyncAgent"],
        ".agents.direct": ["DirectOutputAgent"],
        ".agents.exploring": ["ExploringAgent"],
        ".agents.openai": ["OpenAIAgent"],
        ".agents.policy.agent": ["CopiedPolicyAgent", "PolicyAgent"],
        ".agents.policy.packaged": ["packaged_model"],
        ".agents.policy.sampling": ["SamplingParams"],
        ".agents.scripted": ["RandomAgent", "ScriptedAgent"],
        ".credit.scored": ["ScoredRollout"],
        ".credit.traits": ["estimator_traits"],
        ".envs.base": ["MultistepEnv"],
        ".envs.check.run": ["check_env"],
        ".envs.datasets.mix": ["mix"],
        ".envs.datasets.environments": ["make", "register"],
        ".errors": [
            "AgentError",
            "AgentsGymError",
            "CheckpointError",
            "ConfigError",
            "ContractError",
            "EnvError",
            "EpisodeError",
            "JudgeError",
            "MissingDependencyError",
            "NonFiniteError",
            "StoreError",
            "TaskError",
            "TemplateError",
            "TooManyFailuresError",
        ],
        ".evaluation.mixed": ["evaluate_mixed"],
        ".evaluation.run": ["evaluate"],
        ".failures": ["FailurePolicy"],
        ".fields": ["Field"],
        ".judging.judge": ["Judge"],
        ".judging.rubric": ["Criterion"],
        ".observers.learning_curve": ["LearningCurve"],
        ".recipes.recipe": ["Recipe"],
        ".recipes.run": ["TrainingRun"],
        ".recipes.train": ["train"],
        ".record_audit": ["audit"],
        ".recorded.messages": ["trajectories_from_messages"],
        ".rollouts.process_pool": ["EnvProcessPool"],
        ".rollouts.thread_pool": ["EnvThreadPool"],
        ".serving.policy": ["serve_policy"],
        ".store.reader": ["RolloutStore"],
        ".tiny": ["tiny_policy"],
        ".training.config": ["GRPOEnvConfig"],
        ".training.selection.curriculum": ["Curriculum"],
        ".training.objectives.demonstrations": ["Demonstrations"],
        ".training.objectives.distillation": ["Distillation"],
        ".training.drift": ["logprob_gap"],
        ".training.selection.imitate": ["imitate"],
        ".training.selection.league": ["League"],
        ".training.lifecycle.preemption": ["Preempted"],
        ".training.trainer": ["GRPOEnvTrainer"],
        ".types": ["Action", "Message", "StopReason", "ToolCall", "Trajectory", "Turn", "TurnRequest"],
    },
    _find_moved,
)
sys.meta_path.append(RemovedModules)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
