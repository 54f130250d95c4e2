"""Run the engines of games in processes of their own, since engines hang, crash and share state between threads."""

from agentsgym.envs.engines.engine import Engine
from agentsgym.envs.engines.processes import EngineProcesses, shared_processes

__all__ = ["Engine", "EngineProcesses", "shared_processes"]
