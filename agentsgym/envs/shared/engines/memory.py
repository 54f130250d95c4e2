"""Cache engine responses, so that the rollouts of a task group do not repeat identical requests.

An engine gives the same responses to the same game and commands. The responses of a game are therefore a tree of
commands; if an engine identifies its states, equal positions are merged, and the tree is a graph::

    game ─▶ start ── "go to desk 1" ─▶ position ── "open drawer 1" ─▶ position
                 └─ "look" ─▶ start

A session follows the cached graph without an engine. At the first unknown command an engine starts the game and runs
the commands so far.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from agentsgym.envs.shared.engines.processes import EngineProcesses
from agentsgym.errors import EnvError

STATE = "state_key"
_BYTES_BESIDE = 400  # the size of a response besides its text: its position, the command, the names


@dataclass(eq=False, slots=True)
class _Position:
    """A position and its outgoing commands: for each the response, as JSON, and the next position."""

    steps: dict[str, tuple[str, _Position]] = field(default_factory=dict[str, "tuple[str, _Position]"])


@dataclass(eq=False, slots=True)
class _Game:
    """The cached graph of a game."""

    start: tuple[str, _Position] | None = None
    named: dict[str, _Position] = field(default_factory=dict[str, _Position])
    num_bytes: int = 0


@dataclass(eq=False, slots=True)
class _Session:
    """A session's position, and the commands not yet sent to its engine; None if it has no engine yet."""

    game: dict[str, Any]
    known: _Game
    position: _Position
    untold: list[str] = field(default_factory=list[str])
    has_engine: bool = False


class RememberingProcesses:
    """Like :class:`~agentsgym.envs.shared.engines.processes.EngineProcesses`, with cached responses.

    An engine may identify the position after each response under ``"state_key"``: equal keys must imply equal responses
    to all later commands. Without keys, only equal commands from the start lead to equal positions.

    Attributes:
        num_asked: The number of responses by an engine, replayed commands excluded.
        num_remembered: The number of responses from the cache.
    """

    def __init__(self, processes: EngineProcesses, max_mb: float) -> None:
        """Start with an empty cache.

        Args:
            processes: The processes in which engines run.
            max_mb: The cache limit in megabytes, beyond which the least recently started games are evicted.
        """
        self._processes = processes
        self._max_bytes = int(max_mb * 1e6)
        self._lock = threading.Lock()
        self._games: OrderedDict[str, _Game] = OrderedDict()
        self._sessions: dict[str, _Session] = {}
        self.num_asked = self.num_remembered = 0

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return self._processes.pids

    def begin(self, session_id: str, game: dict[str, Any]) -> dict[str, Any]:
        """Start an episode; arguments, result and errors as for the processes' own method."""
        self.end(session_id)
        known = self._game(json.dumps(game, sort_keys=True))
        if known.start is not None:
            self.num_remembered += 1
            answer, position = known.start
            self._sessions[session_id] = _Session(game, known, position)
            return json.loads(answer)
        given = self._processes.begin(session_id, game)
        known.start = self._keep(known, given)
        self._sessions[session_id] = _Session(game, known, known.start[1], has_engine=True)
        return given

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Run a command; result and errors as for the processes' own method."""
        session = self._sessions.get(session_id)
        if session is None:
            raise EnvError(f"the engine has no game for the session {session_id!r}: it was never started, or has ended")
        step = session.position.steps.get(command)
        if step is None:
            given = self._ask(session_id, session, command)
            session.position.steps[command] = step = self._keep(session.known, given)
        else:
            self.num_remembered += 1
            session.untold.append(command)
            given = json.loads(step[0])
        session.position = step[1]
        return given

    def end(self, session_id: str) -> None:
        """End a session, if it is active."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.has_engine:
            self._processes.end(session_id)

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def forget(self) -> None:
        """Start afresh in a forked process; the cache is kept."""
        self._lock = threading.Lock()
        self._sessions = {}
        self._processes.forget()

    def _ask(self, session_id: str, session: _Session, command: str) -> dict[str, Any]:
        try:
            if not session.has_engine:
                self._processes.begin(session_id, session.game)
                session.has_engine = True
            for earlier in session.untold:
                self._processes.step(session_id, earlier)
            session.untold.clear()
            given = self._processes.step(session_id, command)
        except BaseException:
            self._sessions.pop(session_id, None)
            raise
        self.num_asked += 1
        return given

    def _game(self, key: str) -> _Game:
        with self._lock:
            if key in self._games:
                self._games.move_to_end(key)  # most recently started, evicted last
            num_bytes = sum(game.num_bytes for game in self._games.values())
            while num_bytes > self._max_bytes:
                _, oldest = self._games.popitem(last=False)
                num_bytes -= oldest.num_bytes
            return self._games.setdefault(key, _Game())

    def _keep(self, known: _Game, given: dict[str, Any]) -> tuple[str, _Position]:
        """Cache a response of a game; a position with a known key is reused."""
        answer = json.dumps(given)
        with self._lock:
            name = given.get(STATE)
            position = _Position() if name is None else known.named.setdefault(name, _Position())
            known.num_bytes += len(answer) + _BYTES_BESIDE
        return answer, position
