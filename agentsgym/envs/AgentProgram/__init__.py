"""Agents that are programs: any program that calls an OpenAI-compatible endpoint is played, evaluated and trained."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.AgentProgram.env import AgentProgramEnv as AgentProgramEnv
    from agentsgym.envs.AgentProgram.programs import Endpoint as Endpoint
    from agentsgym.envs.AgentProgram.programs import ProgramOutcome as ProgramOutcome

SPEC = EnvSpec(packages=("starlette", "uvicorn"), extra="programs")
__getattr__, __all__ = lazy(__name__, {".env": ["AgentProgramEnv"], ".programs": ["Endpoint", "ProgramOutcome"]})
