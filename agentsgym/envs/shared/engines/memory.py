"""Cache engine responses, so that the rollouts of a task group do not repeat identical requests.

An engine responds equally to equal games and commands, so that the responses of a game are a tree of commands. If an
engine identifies its states, equal positions are merged, and the tree is a graph::

    game ─▶ start ── "go to desk 1" ─▶ position ── "open drawer 1" ─▶ position
                 └─ "look" ─▶ start

A session follows the cached graph without an engine. At the first unknown command an engine starts the game and runs
the commands so far.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from agentsgym.envs.shared.engines.processes import EngineProcesses

_STATE = "state_key"
_BYTES_BESIDE = 400  # the size of a response besides its text: its position, the command, the names


class _Position(dict[str, "tuple[str, _Position]"]):
    """The known commands at a position: for each the response, as JSON, and the next position."""


@dataclass(eq=False, slots=True)
class _Game:
    """The cached graph of a game."""

    start: tuple[str, _Position] | None = None
    named: dict[str, _Position] = field(default_factory=dict[str, _Position])
    num_bytes: int = 0


@dataclass(eq=False, slots=True)
class _Walk:
    """A session's position, and the commands not yet sent to its engine."""

    game: dict[str, Any]
    known: _Game
    position: _Position
    unsent: list[str] = field(default_factory=list[str])
    has_engine: bool = False


class CachedProcesses(EngineProcesses):
    """Engine processes whose responses are cached.

    An engine may identify the position after each response under ``"state_key"``: equal keys must imply equal responses
    to all later commands. Without keys, only equal commands from the start lead to equal positions.

    Attributes:
        num_computed: The number of responses from engines, without replayed commands.
        num_cached: The number of responses from the cache.
    """

    def __init__(self, engine: str, max_mb: float, **settings: Any) -> None:
        """Start with an empty cache.

        Args:
            engine: The class of the engines, as for :class:`~agentsgym.envs.shared.engines.processes.EngineProcesses`.
            max_mb: The cache limit in megabytes, beyond which the least recently started games are evicted.
            **settings: Further arguments of that class.
        """
        super().__init__(engine, **settings)
        self._max_bytes = int(max_mb * 1e6)
        self._games: OrderedDict[str, _Game] = OrderedDict()
        self._walks: dict[str, _Walk] = {}
        self.num_computed = self.num_cached = 0

    def begin(self, session_id: str, game: dict[str, Any]) -> dict[str, Any]:
        """Start an episode; arguments, result and errors as for the base class."""
        self.end(session_id)
        key = json.dumps(game, sort_keys=True)
        with self._lock:
            if key in self._games:
                self._games.move_to_end(key)  # most recently started, evicted last
            num_bytes = sum(one.num_bytes for one in self._games.values())
            while num_bytes > self._max_bytes:
                _, oldest = self._games.popitem(last=False)
                num_bytes -= oldest.num_bytes
            known = self._games.setdefault(key, _Game())
        if known.start is not None:
            self.num_cached += 1
            answer, position = known.start
            self._walks[session_id] = _Walk(game, known, position)
            return json.loads(answer)
        given = super().begin(session_id, game)
        known.start = self._keep(known, given)
        self._walks[session_id] = _Walk(game, known, known.start[1], has_engine=True)
        return given

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Run a command; result and errors as for the base class."""
        walk = self._walks.get(session_id)
        if walk is None:
            return super().step(session_id, command)  # raises: there is no such session
        if command in walk.position:
            self.num_cached += 1
            walk.unsent.append(command)
            answer, walk.position = walk.position[command]
            return json.loads(answer)
        try:
            if not walk.has_engine:
                super().begin(session_id, walk.game)
                self._walks[session_id] = walk  # beginning ended it
                walk.has_engine = True
            for earlier in walk.unsent:
                super().step(session_id, earlier)
            walk.unsent.clear()
            given = super().step(session_id, command)
        except BaseException:
            self._walks.pop(session_id, None)
            raise
        self.num_computed += 1
        step = walk.position[command] = self._keep(walk.known, given)
        walk.position = step[1]
        return given

    def end(self, session_id: str) -> None:
        """End a session, if it is active."""
        self._walks.pop(session_id, None)
        super().end(session_id)

    def forget(self) -> None:
        """Drop all processes and sessions after a fork; the cache is kept."""
        super().forget()
        self._walks = {}

    def _keep(self, known: _Game, given: dict[str, Any]) -> tuple[str, _Position]:
        """Cache a response of a game; a position with a known key is reused."""
        answer = json.dumps(given)
        with self._lock:
            name = given.get(_STATE)
            position = _Position() if name is None else known.named.setdefault(name, _Position())
            known.num_bytes += len(answer) + _BYTES_BESIDE
        return answer, position
