"""Train language-model agents over many turns.

The public names stand here and are imported when they are first used, so that ``import agentsgym`` stays fast and
needs no torch.

    >>> import agentsgym
    >>> agentsgym.StopReason.MAX_TURNS.truncated
    True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentsgym.agents.base import Agent, AsyncAgent
    from agentsgym.agents.direct import DirectOutputAgent
    from agentsgym.agents.openai import OpenAIAgent
    from agentsgym.agents.policy import PolicyAgent
    from agentsgym.agents.sampling import Sampling
    from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
    from agentsgym.batch.audit import AuditReport, audit
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.registry import make, register
    from agentsgym.errors import (
        AgentFault,
        AgentsGymError,
        ConfigError,
        EnvironmentFault,
        EpisodeFault,
        MissingDependency,
        TaskError,
        TemplateError,
    )
    from agentsgym.evaluation.run import evaluate
    from agentsgym.rollouts.pools import ThreadPool
    from agentsgym.rollouts.processes import ProcessPool
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.types import Action, Message, StopReason, Trajectory, Turn, TurnRequest

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Agent",
    "AgentFault",
    "AgentsGymError",
    "AsyncAgent",
    "AuditReport",
    "ConfigError",
    "DirectOutputAgent",
    "EnvironmentFault",
    "EpisodeFault",
    "GRPOEnvConfig",
    "GRPOEnvTrainer",
    "Message",
    "MissingDependency",
    "MultistepEnv",
    "OpenAIAgent",
    "PolicyAgent",
    "ProcessPool",
    "RandomAgent",
    "Sampling",
    "ScriptedAgent",
    "StopReason",
    "TaskError",
    "TemplateError",
    "ThreadPool",
    "Trajectory",
    "Turn",
    "TurnRequest",
    "__version__",
    "audit",
    "evaluate",
    "make",
    "register",
]

_HOMES = {
    "agents.base": ("Agent", "AsyncAgent"),
    "agents.direct": ("DirectOutputAgent",),
    "agents.openai": ("OpenAIAgent",),
    "agents.policy": ("PolicyAgent",),
    "agents.sampling": ("Sampling",),
    "agents.scripted": ("RandomAgent", "ScriptedAgent"),
    "batch.audit": ("AuditReport", "audit"),
    "envs.base": ("MultistepEnv",),
    "envs.registry": ("make", "register"),
    "errors": (
        "AgentFault",
        "AgentsGymError",
        "ConfigError",
        "EnvironmentFault",
        "EpisodeFault",
        "MissingDependency",
        "TaskError",
        "TemplateError",
    ),
    "evaluation.run": ("evaluate",),
    "rollouts.pools": ("ThreadPool",),
    "rollouts.processes": ("ProcessPool",),
    "training.config": ("GRPOEnvConfig",),
    "training.trainer": ("GRPOEnvTrainer",),
    "types": ("Action", "Message", "StopReason", "Trajectory", "Turn", "TurnRequest"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module at its first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
