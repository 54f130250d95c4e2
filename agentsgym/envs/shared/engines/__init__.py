"""Run game engines in separate processes, since engines hang, crash and share state between threads.

An engine is a class that is instantiated without arguments in such a process, runs one episode at a time, and is reused
for further episodes. ``start(game)`` loads and starts a game, ``step(command)`` runs one command, and both return a
dict; ``close()`` releases the engine's resources. All values are JSON. An engine must be deterministic: if another
session causes the process to end, the session is replayed in a new one.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from agentsgym.envs.shared.engines.processes import EngineProcesses

_STATE = "state_key"
_OVERHEAD_BYTES = 400  # the size of a response's position, command and keys, in addition to its text


class _Position(dict[str, "tuple[str, _Position]"]):
    """The cached commands at a position: the response to each, as JSON, and the next position."""


@dataclass(eq=False, slots=True)
class _Game:
    """The cached graph of a game."""

    start: tuple[str, _Position] | None = None
    positions_by_key: dict[str, _Position] = field(default_factory=dict[str, _Position])
    num_bytes: int = 0


@dataclass(eq=False, slots=True)
class _Walk:
    """A session's position, and the commands not yet sent to its engine."""

    game: dict[str, Any]
    graph: _Game
    position: _Position
    unsent: list[str] = field(default_factory=list[str])
    has_engine: bool = False


class CachedProcesses(EngineProcesses):
    """Engine processes whose responses are cached.

    An engine is deterministic, so its responses to one game form a tree over command sequences. If an engine identifies
    its states, equal positions are merged and the tree becomes a graph::

        game ─▶ start ── "go to desk 1" ─▶ position ── "open drawer 1" ─▶ position
                     └─ "look" ─▶ start

    A session follows the cached graph without an engine. At the first command whose response is not cached, an engine
    starts the game and replays the commands so far.

    An engine may identify the position after each response under ``"state_key"``; equal keys must imply equal responses
    to all later commands. Without keys, only equal command sequences lead to equal positions.

    Attributes:
        num_computed: The number of ``step`` responses computed by engines, excluding replayed commands.
        num_cached: The number of responses from the cache, including those of ``begin``.
    """

    def __init__(self, engine: str, max_mb: float, **settings: Any) -> None:
        """Start with an empty cache.

        Args:
            engine: The class of the engines, as in :class:`~agentsgym.envs.shared.engines.processes.EngineProcesses`.
            max_mb: The size in megabytes above which the least recently started games are evicted.
            **settings: Further arguments of ``EngineProcesses``.
        """
        super().__init__(engine, **settings)
        self._max_bytes = int(max_mb * 1e6)
        self._games: OrderedDict[str, _Game] = OrderedDict()
        self._walks: dict[str, _Walk] = {}
        self.num_computed = self.num_cached = 0

    def begin(self, session_id: str, game: dict[str, Any]) -> dict[str, Any]:
        """Start an episode; the arguments, result and errors are those of the base class."""
        self.end(session_id)
        key = json.dumps(game, sort_keys=True)
        with self._lock:
            if key in self._games:
                self._games.move_to_end(key)  # the most recently started game is evicted last
            num_bytes = sum(game.num_bytes for game in self._games.values())
            while num_bytes > self._max_bytes:
                _, oldest = self._games.popitem(last=False)
                num_bytes -= oldest.num_bytes
            graph = self._games.setdefault(key, _Game())
        if graph.start is not None:
            self.num_cached += 1
            text, position = graph.start
            self._walks[session_id] = _Walk(game, graph, position)
            return json.loads(text)
        response = super().begin(session_id, game)
        graph.start = self._cache(graph, response)
        self._walks[session_id] = _Walk(game, graph, graph.start[1], has_engine=True)
        return response

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Run a command; the result and errors are those of the base class."""
        walk = self._walks.get(session_id)
        if walk is None:
            return super().step(session_id, command)  # raises, since there is no such session
        if command in walk.position:
            self.num_cached += 1
            walk.unsent.append(command)
            text, walk.position = walk.position[command]
            return json.loads(text)
        try:
            if not walk.has_engine:
                super().begin(session_id, walk.game)
                self._walks[session_id] = walk  # `begin` calls `end`, which removed the walk
                walk.has_engine = True
            for earlier in walk.unsent:
                super().step(session_id, earlier)
            walk.unsent.clear()
            response = super().step(session_id, command)
        except BaseException:
            self._walks.pop(session_id, None)
            raise
        self.num_computed += 1
        walk.position[command] = text, position = self._cache(walk.graph, response)
        walk.position = position
        return response

    def end(self, session_id: str) -> None:
        """End a session, if it is active."""
        self._walks.pop(session_id, None)
        super().end(session_id)

    def _cache(self, graph: _Game, response: dict[str, Any]) -> tuple[str, _Position]:
        """Cache a response of a game; a position with a known key is reused."""
        text = json.dumps(response)
        with self._lock:
            key = response.get(_STATE)
            position = _Position() if key is None else graph.positions_by_key.setdefault(key, _Position())
            graph.num_bytes += len(text) + _OVERHEAD_BYTES
        return text, position


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
