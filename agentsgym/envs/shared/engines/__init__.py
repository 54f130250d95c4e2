"""Run game engines in separate processes, since engines hang, crash and share state between threads."""

from agentsgym.envs.shared.engines.engine import Engine
from agentsgym.envs.shared.engines.memory import RememberingProcesses
from agentsgym.envs.shared.engines.processes import EngineProcesses
from agentsgym.envs.shared.engines.shared import close_shared, shared_processes

__all__ = ["Engine", "EngineProcesses", "RememberingProcesses", "close_shared", "shared_processes"]
