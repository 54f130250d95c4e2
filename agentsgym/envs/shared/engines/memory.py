"""Remember what engines answered, so that the rollouts of a task group do not ask for the same thing again and again.

An engine gives the same answers to the same game and commands. So the answers of a game are a tree of commands; where
an engine names its states, positions that are equal are one, and the tree is a graph::

    game ─▶ start ── "go to desk 1" ─▶ position ── "open drawer 1" ─▶ position
                 └─ "look" ─▶ start

A session moves along what is known without an engine. At the first unknown command an engine begins the game and plays
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
_BYTES_BESIDE = 400  # what an answer takes beside its text: its position, the command, the names


@dataclass(eq=False, slots=True)
class _Position:
    """Where commands lead from one position: for each the answer, as JSON, and the next position."""

    steps: dict[str, tuple[str, _Position]] = field(default_factory=dict[str, "tuple[str, _Position]"])


@dataclass(eq=False, slots=True)
class _Game:
    """What is known of a game."""

    start: tuple[str, _Position] | None = None
    named: dict[str, _Position] = field(default_factory=dict[str, _Position])
    num_bytes: int = 0


@dataclass(eq=False, slots=True)
class _Session:
    """Where a session is, and the commands that its engine has not been told; None where it has no engine yet."""

    game: dict[str, Any]
    known: _Game
    position: _Position
    untold: list[str] = field(default_factory=list[str])
    has_engine: bool = False


class RememberingProcesses:
    """Plays as :class:`~agentsgym.envs.shared.engines.processes.EngineProcesses` does, and asks no engine twice.

    An engine may name the position after each answer under ``"state_key"``: equal keys must mean equal answers to all
    commands from there on. Without, only equal commands from the start lead to equal positions.

    Attributes:
        num_asked: Answers that an engine gave, replayed commands left out.
        num_remembered: Answers that none was needed for.
    """

    def __init__(self, processes: EngineProcesses, max_mb: float) -> None:
        """Remember nothing so far.

        Args:
            processes: Where engines run.
            max_mb: Megabytes of answers above which the games that were not begun for longest are forgotten.
        """
        self._processes = processes
        self._max_bytes = int(max_mb * 1e6)
        self._lock = threading.Lock()
        self._games: OrderedDict[str, _Game] = OrderedDict()
        self._sessions: dict[str, _Session] = {}
        self.num_asked = self.num_remembered = 0

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        return self._processes.pids

    def begin(self, session_id: str, game: dict[str, Any]) -> dict[str, Any]:
        """Begin a game; arguments, result and errors as of the processes' own method."""
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
        """Play a command; result and errors as of the processes' own method."""
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
        """End a session, if it is in play."""
        session = self._sessions.pop(session_id, None)
        if session is not None and session.has_engine:
            self._processes.end(session_id)

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def forget(self) -> None:
        """Start anew in a process that was forked off; what is remembered stays."""
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
                self._games.move_to_end(key)  # begun last, and forgotten last
            num_bytes = sum(game.num_bytes for game in self._games.values())
            while num_bytes > self._max_bytes:
                _, oldest = self._games.popitem(last=False)
                num_bytes -= oldest.num_bytes
            return self._games.setdefault(key, _Game())

    def _keep(self, known: _Game, given: dict[str, Any]) -> tuple[str, _Position]:
        """Note an answer of a game; the position after it is the one of that name, if it has been seen."""
        answer = json.dumps(given)
        with self._lock:
            name = given.get(STATE)
            position = _Position() if name is None else known.named.setdefault(name, _Position())
            known.num_bytes += len(answer) + _BYTES_BESIDE
        return answer, position
