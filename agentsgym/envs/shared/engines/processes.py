"""Assign sessions to engine processes, and replay them elsewhere if another session ends their process."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass, field
from typing import Any

from agentsgym.envs.shared.child_process import ChildExitedError, ChildProcess
from agentsgym.errors import EnvError
from agentsgym.texts import shown

_MODULE = "agentsgym.envs.shared.engines.main"
_LOAD_LIMIT_S = 180.0  # enough for slow imports on a busy machine


class _EngineError(Exception):
    """An exception that an engine raised in its process."""


class _Worker:
    """A process that runs several engines.

    Attributes:
        lock: The lock that a thread holds while the process handles its request.
        is_over: Whether the process has ended; its sessions are then replayed in another one.
        num_games: The number of episodes started so far.
        slots_in_use: The slots of the active sessions; the engines in other slots are idle.
    """

    def __init__(self, engine: str) -> None:
        """Set up the worker; its process starts with the first episode."""
        self.lock = threading.Lock()
        self.is_over = False
        self.num_games = 0
        self.slots_in_use: set[int] = set()
        self._engine = engine
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it has not started."""
        return None if self._child is None else self._child.pid

    def call(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and return the engine's response; the caller must hold the lock.

        Raises:
            _EngineError: The engine raised.
            ChildExitedError: The process ended.
            EnvError: The process cannot be started, or cannot load the engine.
        """
        try:
            if self._child is None:
                self._child = ChildProcess(_MODULE, "an engine process")
                loaded = self._child.call({"load": self._engine}, _LOAD_LIMIT_S)
                if "error" in loaded:
                    raise EnvError(  # noqa: TRY301  # like any failure here, it ends the process
                        f"the engine {self._engine} cannot be loaded: {loaded['error']}: {loaded['sentence']}"
                    )
            reply = self._child.call(request, limit_s)
        except BaseException:
            self.end()  # otherwise the next request would read this request's response
            raise
        if "error" in reply:
            raise _EngineError(f"{reply['error']}: {reply['sentence']}")
        return reply["response"]

    def end(self) -> None:
        """End the process."""
        self.is_over = True
        if self._child is not None:
            self._child.end()


@dataclass(eq=False, slots=True)
class _Session:
    """An active episode: the data needed to replay it, its worker, and whether it has started there."""

    game: dict[str, Any]
    commands: list[str] = field(default_factory=list[str])
    worker: _Worker | None = None
    slot: int = -1
    has_started: bool = False


class EngineProcesses:
    """Runs episodes in engine processes, many sessions in each; thread-safe.

    The first process starts at first use, and further ones, up to a limit, when all are busy. If a process dies or
    takes too long, the session whose call it was running fails; the other sessions are replayed in another process and
    continue there.
    """

    def __init__(
        self,
        engine: str,
        *,
        num_processes: int = 1,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        max_games_per_process: int | None = None,
        max_sessions_per_process: int | None = None,
    ) -> None:
        """Set up the sessions' bookkeeping; processes are started later.

        Args:
            engine: The class of the engines, as ``"module:Class"``; see :mod:`agentsgym.envs.shared.engines`.
            num_processes: The maximum number of processes, exceeded only if every process is full.
            step_timeout_s: The time limit for a command, in seconds.
            start_timeout_s: The time limit for loading and starting a game, in seconds.
            max_games_per_process: The number of episodes after which a process is replaced once its sessions have
                ended; None to never replace it.
            max_sessions_per_process: The maximum number of concurrent sessions per process; None for no limit.
        """
        self._engine = engine
        self._num_processes = num_processes
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._max_games, self._max_sessions = max_games_per_process, max_sessions_per_process
        self._lock = threading.Lock()  # guards the workers and sessions, and is not held while a worker runs
        self._workers: list[_Worker] = []
        self._sessions: dict[str, _Session] = {}

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        with self._lock:
            return [worker.pid for worker in self._workers if worker.pid is not None and not worker.is_over]

    def begin(self, session_id: str, game: dict[str, Any]) -> dict[str, Any]:
        """Start an episode, in an idle engine if there is one.

        Args:
            session_id: The session's name; an active session with this name is ended.
            game: The argument of the engine's ``start``, a JSON object.

        Returns:
            The engine's response.

        Raises:
            EnvError: The engine raised an exception, or its process died, took too long or cannot be started.
        """
        self.end(session_id)
        session = _Session(game)
        with self._lock:
            self._sessions[session_id] = session
        return self._play_or_end(session_id, session, None)

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Run a command in a session; the result and errors are those of :meth:`begin`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise EnvError(f"the session {session_id!r} has no game in the engine: it was never started, or has ended")
        return self._play_or_end(session_id, session, command)

    def end(self, session_id: str) -> None:
        """End a session, if it is active; its engine is reused."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            worker = None if session is None else session.worker
            if session is None or worker is None:
                return
            worker.slots_in_use.discard(session.slot)
            if self._is_used_up(worker) and not worker.slots_in_use:
                self._workers = [other for other in self._workers if other is not worker]
                worker.end()

    def close(self) -> None:
        """End all processes; sessions that are still active continue in new ones."""
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def _play_or_end(self, session_id: str, session: _Session, command: str | None) -> dict[str, Any]:
        """Start the game (command None) or run a command; any exception ends the session."""
        doing = "while starting the game" if command is None else f"while running the command {shown(command)}"
        try:
            return self._play(session, command)
        except _EngineError as error:
            self.end(session_id)
            raise EnvError(f"the engine failed {doing}: {error}") from error
        except ChildExitedError as error:
            self.end(session_id)
            limit_s = self._start_timeout_s if command is None else self._step_timeout_s
            how = f"was terminated after {limit_s:g} s" if error.timed_out else error.how
            raise EnvError(f"the engine's process {how} {doing}") from error
        except BaseException:
            self.end(session_id)
            raise

    def _play(self, session: _Session, command: str | None) -> dict[str, Any]:
        """Start or replay the session in its worker if needed, and run the command unless it is None."""
        while True:
            worker = self._assign_worker(session)
            with worker.lock:
                if worker.is_over:
                    continue  # the worker ended while this thread waited for the lock
                slot, response = {"slot": session.slot}, dict[str, Any]()
                if not session.has_started:
                    response = worker.call({**slot, "game": session.game}, self._start_timeout_s)
                    for earlier in session.commands:
                        worker.call({**slot, "command": earlier}, self._step_timeout_s)
                    session.has_started = True
                if command is not None:
                    response = worker.call({**slot, "command": command}, self._step_timeout_s)
                    session.commands.append(command)
                return response

    def _assign_worker(self, session: _Session) -> _Worker:
        """Return the session's live worker, after assigning an idle, new or non-full one if it has none."""
        with self._lock:
            if session.worker is None or session.worker.is_over:
                self._workers = [worker for worker in self._workers if not worker.is_over]
                limit = math.inf if self._max_sessions is None else self._max_sessions
                with_room = [
                    worker
                    for worker in self._workers
                    if len(worker.slots_in_use) < limit and not self._is_used_up(worker)
                ]
                idle = [worker for worker in with_room if not worker.lock.locked()]
                if not idle and (not with_room or len(self._workers) < self._num_processes):
                    idle = [_Worker(self._engine)]
                    self._workers += idle
                worker = session.worker = min(idle or with_room, key=lambda worker: len(worker.slots_in_use))
                session.slot = next(slot for slot in itertools.count() if slot not in worker.slots_in_use)
                session.has_started = False
                worker.slots_in_use.add(session.slot)
                worker.num_games += 1
            return session.worker

    def _is_used_up(self, worker: _Worker) -> bool:
        return self._max_games is not None and worker.num_games >= self._max_games
