"""Run the engines of games in processes of their own, since engines hang, crash and share state between threads."""

from agentsgym.envs.engines.engine import Engine
from agentsgym.envs.engines.memory import RememberingProcesses
from agentsgym.envs.engines.processes import EngineProcesses
from agentsgym.envs.engines.shared import close_shared, shared_processes

__all__ = ["Engine", "EngineProcesses", "RememberingProcesses", "close_shared", "shared_processes"]
