"""Run game engines in separate processes, since engines hang, crash and share state between threads.

An engine is a class that is instantiated without arguments in such a process, runs one episode at a time, and is reused
for further episodes. ``start(game)`` loads and starts a game, ``step(command)`` runs one command, and both return a
dict; ``close()`` releases the engine's resources. All values are JSON. An engine must be deterministic: if another
session causes the process to end, the session is replayed in a new one.
"""

from agentsgym.envs.shared.engines.memory import CachedProcesses
from agentsgym.envs.shared.engines.processes import EngineProcesses
from agentsgym.envs.shared.engines.shared import close_shared, shared_processes

__all__ = ["CachedProcesses", "EngineProcesses", "close_shared", "shared_processes"]
