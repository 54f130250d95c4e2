"""Sessions in engine processes: placed, replayed if another's fault ended their process, and freed."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass, field
from typing import Any

from agentsgym.envs.shared.child_process import ChildEndedError, ChildProcess
from agentsgym.errors import EnvError
from agentsgym.texts import shown

_MODULE = "agentsgym.envs.shared.engines.main"
_LOAD_LIMIT_S = 180.0  # imports, on a busy machine


class _EngineError(Exception):
    """An exception that an engine raised in its process."""


class _Worker:
    """A process of engines.

    Attributes:
        lock: The lock that is held while the process works; threads take turns.
        is_over: Whether the process has ended; its sessions are then replayed in another one.
        num_games: The number of episodes started so far.
        taken: The slots of the active sessions; the engines in other slots wait for the next episode.
    """

    def __init__(self, engine: str) -> None:
        """Set up; the process starts with its first episode.

        Args:
            engine: The class of the engines, as ``"module:Class"``.
        """
        self.lock = threading.Lock()
        self.is_over = False
        self.num_games = 0
        self.taken: set[int] = set()
        self._engine = engine
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it has started."""
        return None if self._child is None else self._child.pid

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request; the caller must hold the lock.

        Raises:
            _EngineError: The engine raised.
            ChildEndedError: The process ended.
            EnvError: The process cannot be started, or cannot load the engine.
        """
        try:
            if self._child is None:
                self._child = ChildProcess(_MODULE, "a process of engines")
                loaded = self._child.ask({"load": self._engine}, _LOAD_LIMIT_S)
                if "error" in loaded:
                    raise EnvError(  # noqa: TRY301  # as any failure here, it ends the process
                        f"the engine {self._engine} cannot be loaded: {loaded['error']}: {loaded['sentence']}"
                    )
            reply = self._child.ask(request, limit_s)
        except BaseException:
            self.end()  # an unread response would be taken for the next request's
            raise
        if "error" in reply:
            raise _EngineError(f"{reply['error']}: {reply['sentence']}")
        return reply["answer"]

    def end(self) -> None:
        """End the process."""
        self.is_over = True
        if self._child is not None:
            self._child.end()

    def forget(self) -> None:
        """Drop the process without ending it, after a fork: it belongs to the parent."""
        self.is_over = True
        if self._child is not None:
            self._child.forget()


@dataclass(eq=False, slots=True)
class _Session:
    """One active episode: the data to replay it, its worker, and whether it has started there."""

    game: dict[str, Any]
    commands: list[str] = field(default_factory=list[str])
    worker: _Worker | None = None
    slot: int = -1
    is_begun: bool = False


class EngineProcesses:
    """Runs episodes in engine processes, many sessions in each; thread-safe.

    Processes start at first use, and another one if all are busy, up to a limit. One that dies or takes too long fails
    its current call, and that session with it; its other sessions continue in another process, where their commands are
    replayed.
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
        """Set up; no process is started.

        Args:
            engine: The class of the engines, as ``"module:Class"``: see :mod:`agentsgym.envs.shared.engines`.
            num_processes: The maximum number of processes; more are started if all are full.
            step_timeout_s: The time limit of a command in seconds.
            start_timeout_s: The time limit of loading and starting a game in seconds.
            max_games_per_process: The number of episodes after which a process is replaced, once its sessions end; None
                for never.
            max_sessions_per_process: The maximum number of concurrent sessions per process; None for no limit.
        """
        self._engine = engine
        self._num_processes = num_processes
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._max_games, self._max_sessions = max_games_per_process, max_sessions_per_process
        self._lock = threading.Lock()  # guards the lists; a worker's own lock is held while it works
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
            session_id: A name for the session; an active session of that name ends.
            game: The argument of the engine's ``start``, JSON values.

        Returns:
            The engine's response.

        Raises:
            EnvError: The engine raised, its process died or took too long, or none can be started.
        """
        self.end(session_id)
        session = _Session(game)
        with self._lock:
            self._sessions[session_id] = session
        return self._guarded(session_id, session, None)

    def step(self, session_id: str, command: str) -> dict[str, Any]:
        """Run a command in a session; arguments, result and errors as for :meth:`begin`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise EnvError(f"the engine has no game for the session {session_id!r}: it was never started, or has ended")
        return self._guarded(session_id, session, command)

    def end(self, session_id: str) -> None:
        """End a session, if it is active; its engine is reused."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
            worker = None if session is None else session.worker
            if session is None or worker is None:
                return
            worker.taken.discard(session.slot)
            if self._is_worn(worker) and not worker.taken:
                self._workers = [one for one in self._workers if one is not worker]
                worker.end()

    def close(self) -> None:
        """End all processes; the active sessions continue in new ones."""
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def forget(self) -> None:
        """Drop all processes and sessions after a fork: the running processes belong to the parent."""
        self._lock = threading.Lock()
        workers, self._workers, self._sessions = self._workers, [], {}
        for worker in workers:
            worker.forget()

    def _guarded(self, session_id: str, session: _Session, command: str | None) -> dict[str, Any]:
        """Run a command; any exception ends the session."""
        doing = "when the game was begun" if command is None else f"at the command {shown(command)}"
        try:
            return self._play(session, command)
        except _EngineError as error:
            self.end(session_id)
            raise EnvError(f"the engine failed {doing}: {error}") from error
        except ChildEndedError as error:
            self.end(session_id)
            limit_s = self._start_timeout_s if command is None else self._step_timeout_s
            why = f"took longer than {limit_s:g} s and was ended" if error.was_killed else error.how
            raise EnvError(f"the engine's process {why} {doing}") from error
        except BaseException:
            self.end(session_id)
            raise

    def _play(self, session: _Session, command: str | None) -> dict[str, Any]:
        """Start the session in its worker, unless it has started, and run one more command, if there is one."""
        while True:
            worker = self._place(session)
            with worker.lock:
                if worker.is_over:
                    continue  # ended while this thread waited for the lock
                slot, answer = {"slot": session.slot}, dict[str, Any]()
                if not session.is_begun:
                    answer = worker.ask({**slot, "game": session.game}, self._start_timeout_s)
                    for earlier in session.commands:
                        worker.ask({**slot, "command": earlier}, self._step_timeout_s)
                    session.is_begun = True
                if command is not None:
                    answer = worker.ask({**slot, "command": command}, self._step_timeout_s)
                    session.commands.append(command)
                return answer

    def _place(self, session: _Session) -> _Worker:
        """Return the session's worker; if it has none or that one has ended, an idle one, else one with room."""
        with self._lock:
            if session.worker is None or session.worker.is_over:
                self._workers = [worker for worker in self._workers if not worker.is_over]
                most = math.inf if self._max_sessions is None else self._max_sessions
                roomy = [one for one in self._workers if len(one.taken) < most and not self._is_worn(one)]
                idle = [worker for worker in roomy if not worker.lock.locked()]
                if not idle and (not roomy or len(self._workers) < self._num_processes):
                    idle = [_Worker(self._engine)]
                    self._workers += idle
                worker = session.worker = min(idle or roomy, key=lambda one: len(one.taken))
                session.slot = next(slot for slot in itertools.count() if slot not in worker.taken)
                session.is_begun = False
                worker.taken.add(session.slot)
                worker.num_games += 1
            return session.worker

    def _is_worn(self, worker: _Worker) -> bool:
        return self._max_games is not None and worker.num_games >= self._max_games
