"""Agents that are programs: any program that calls an OpenAI-compatible endpoint is played, evaluated and trained."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.AgentProgram.env import AgentProgramEnv
    from agentsgym.envs.AgentProgram.programs import Endpoint, ProgramOutcome

__all__ = ["AgentProgramEnv", "Endpoint", "ProgramOutcome"]

SPEC = EnvSpec(packages=("starlette", "uvicorn"), extra="programs")
__getattr__ = lazy(__name__)
