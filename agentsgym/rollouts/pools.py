"""Threads in which environments that block are advanced, a bounded number at a time."""

from __future__ import annotations

import threading
import time
from enum import Enum
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from agentsgym.errors import ConfigError, EpisodeFault
from agentsgym.rollouts.scheduler import Desk, Finished, Move, Outcome, Playing, Raised, Stage, advance

GRACE_S = 5.0  # how long what runs may take to end when a run is broken off


class Pool(Protocol):
    """Workers that advance episodes; kept over any number of rollouts."""

    def stage(self, desk: Desk) -> Stage:
        """Begin a run."""
        ...


class ThreadPool:
    """Advances episodes in threads of this process: for environments that wait (for a server, a subprocess, a file).

    The steps of one session never overlap; those of different sessions do, so the environment's hooks must bear it.
    A step that is given up is left running in its thread, which another one replaces; when it returns, its result is
    dropped and its session's state is forgotten.

    The threads are started when they are first needed and end with :meth:`close` or the ``with`` block; used again
    after that, the pool starts new ones.
    """

    def __init__(self, num_workers: int) -> None:
        """Set the bound.

        Args:
            num_workers: How many steps run at a time.

        Raises:
            ConfigError: It is no positive int.
        """
        check_num_workers(num_workers)
        self.num_workers = num_workers
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; one whose step was given up ends when the step returns."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def stage(self, desk: Desk) -> Stage:
        """Begin a run.

        Raises:
            ConfigError: It is begun by a step that runs in this pool.
        """
        if threading.current_thread() in self._threads:
            raise ConfigError("a step in a ThreadPool cannot wait for others in the same pool: make another for it")
        return _ThreadStage(self, desk)

    def submit(self, job: _Job) -> None:
        """Have a step done by the next free thread."""
        while len(self._threads) < self.num_workers:
            self._start_thread()
        self._jobs.put(job)

    def give_up(self, job: _Job) -> bool:
        """Stop waiting for a step and replace its thread; returns whether it still ran."""
        with job.lock:
            if job.phase is not _Phase.RUNNING or job.thread is None:
                return False
            job.phase = _Phase.GIVEN_UP
        self._threads.discard(job.thread)
        self._start_thread()
        return True

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_serve, args=(self._jobs,), name=f"agentsgym-environments-{self._num_started}", daemon=True
        )
        self._num_started += 1
        self._threads.add(thread)
        thread.start()


def check_num_workers(num_workers: Any) -> None:
    """Raise :class:`ConfigError` for what is no positive int."""
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ConfigError(f"num_workers must be a positive int, got {num_workers!r}")


class _Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"


class _Job:
    """One step of one episode."""

    __slots__ = ("index", "lock", "move", "phase", "playing", "since", "stage", "thread")

    def __init__(self, stage: _ThreadStage, index: int, playing: Playing[Any], move: Move) -> None:
        self.stage = stage
        self.index = index
        self.playing = playing
        self.move = move
        self.phase = _Phase.WAITING
        self.since = 0.0
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def begin(self) -> bool:
        """Say that it runs from now on; False if nobody waits for it."""
        with self.lock:
            if self.phase is _Phase.GIVEN_UP:
                return False
            self.thread, self.since, self.phase = threading.current_thread(), time.monotonic(), _Phase.RUNNING
        return True

    def end(self) -> bool:
        """Say that it is done; False if nobody waits for it any more."""
        with self.lock:
            if self.phase is _Phase.GIVEN_UP:
                return False
            self.phase = _Phase.DONE
        return True

    def drop(self) -> bool:
        """Want it no more if it has not begun; returns whether it had not."""
        with self.lock:
            if self.phase is not _Phase.WAITING:
                return False
            self.phase = _Phase.GIVEN_UP
        return True


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """Do one step after the other, until there is no more to come or this thread was replaced."""
    while (job := jobs.get()) is not None:
        if not job.begin():
            continue
        outcome = advance(job.playing, job.move)
        if not job.end():
            job.playing.close()
            return
        job.stage.done(job.index, outcome)


class _ThreadStage:
    """One run's part of a pool."""

    def __init__(self, pool: ThreadPool, desk: Desk) -> None:
        self._pool = pool
        self._desk = desk
        self._playing: dict[int, Playing[Any]] = {}
        self._jobs: dict[int, _Job] = {}

    def done(self, index: int, outcome: Outcome) -> None:
        """Report a step; called on the pool's threads."""
        self._desk.post(self._stepped, index, outcome)

    def advance(self, moves: dict[int, Move]) -> None:
        """Submit all moves."""
        for index, move in moves.items():
            if index not in self._playing:
                self._playing[index] = self._desk.episodes[index].play()
            self._jobs[index] = job = _Job(self, index, self._playing[index], move)
            self._pool.submit(job)
        moves.clear()

    def running(self) -> list[tuple[int, float]]:
        """The steps in the pool's threads."""
        return [(index, job.since) for index, job in self._jobs.items() if job.phase is _Phase.RUNNING]

    def abandon(self, index: int, fault: EpisodeFault) -> None:
        """Leave a step to itself, or do not begin it."""
        job = self._jobs[index]
        has_begun = not job.drop()
        if not has_begun:
            job.playing.close()
        if not has_begun or self._pool.give_up(job):
            del self._jobs[index], self._playing[index]
            self._desk.stepped(index, Finished(self._desk.episodes[index].abandon(fault)))

    def close(self) -> None:
        """Close every generator: at once where no step runs, else when it returns."""
        running = [job for job in self._jobs.values() if not job.drop()]
        ending = time.monotonic() + GRACE_S
        while any(job.phase is _Phase.RUNNING for job in running) and time.monotonic() < ending:
            time.sleep(0.01)
        given_up = {job.index for job in running if self._pool.give_up(job)}
        for index in self._playing.keys() - given_up:
            self._playing[index].close()

    def _stepped(self, index: int, outcome: Outcome) -> None:
        if self._jobs.pop(index, None) is not None:
            if isinstance(outcome, Finished | Raised):
                del self._playing[index]
            self._desk.stepped(index, outcome)
