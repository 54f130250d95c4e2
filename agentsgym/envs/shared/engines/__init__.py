"""Run game engines in separate processes, since engines hang, crash and share state between threads.

An engine is a class that is made without arguments in such a process, has one active episode at a time, and is reused
for the next one. ``start(game)`` loads and starts a game, ``step(command)`` runs one command, and both return a dict;
``close()`` releases the engine's resources. All values are JSON. The same game and commands must give the same
responses: a session whose process was ended by another's fault is replayed.
"""

from agentsgym.envs.shared.engines.memory import CachedProcesses
from agentsgym.envs.shared.engines.processes import EngineProcesses
from agentsgym.envs.shared.engines.shared import close_shared, shared_processes

__all__ = ["CachedProcesses", "EngineProcesses", "close_shared", "shared_processes"]
