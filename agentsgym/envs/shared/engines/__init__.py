"""Run game engines in separate processes, since engines hang, crash and share state between threads.

An engine is a class that is instantiated without arguments in such a process, runs one episode at a time, and is reused
for further episodes. ``start(game)`` loads and starts a game, ``step(command)`` runs one command, and both return a
dict; ``close()`` releases the engine's resources. All values are JSON. An engine must be deterministic: if another
session causes the process to end, the session is replayed in a new one.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from agentsgym.envs.shared.engines.memory import CachedProcesses
from agentsgym.envs.shared.engines.processes import EngineProcesses

__all__ = ["CachedProcesses", "EngineProcesses", "close_shared", "shared_processes"]

_shared: dict[tuple[Any, ...], EngineProcesses] = {}
_shared_lock = threading.Lock()


def shared_processes(engine: str, *, cache_mb: float = 0.0, **settings: Any) -> EngineProcesses:
    """Return the engine processes for these settings, which are created at first use and ended at exit.

    An environment calls this at every use and stores nothing, so that it can be pickled and forked.

    Args:
        engine: The engine, as in :class:`EngineProcesses`.
        cache_mb: The size of the response cache in megabytes, as in :class:`CachedProcesses`; 0 for no cache.
        **settings: Further arguments of :class:`EngineProcesses`.
    """
    key = (engine, cache_mb, *sorted(settings.items()))
    with _shared_lock:
        if key not in _shared:
            _shared[key] = (
                CachedProcesses(engine, cache_mb, **settings) if cache_mb else EngineProcesses(engine, **settings)
            )
        return _shared[key]


def close_shared() -> None:
    """End all shared engine processes; the next episode starts new ones."""
    for processes in [*_shared.values()]:
        processes.close()


def _forget_shared() -> None:
    """Leave the processes to the parent process after a fork; a thread there may hold the lock."""
    global _shared, _shared_lock
    _shared, _shared_lock = {}, threading.Lock()


atexit.register(close_shared)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_shared)
