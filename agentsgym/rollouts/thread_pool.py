"""Run environments that block in threads of this process, a bounded number at a time."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from agentsgym.errors import ConfigError, EpisodeError
from agentsgym.fields import is_int, require
from agentsgym.rollouts.interfaces import (
    GRACE_S,
    Executor,
    Finished,
    Input,
    Raised,
    TrialGenerator,
    TrialOutcome,
    advance,
)
from agentsgym.rollouts.scheduler import Scheduler


class EnvThreadPool:
    """Advances trials in threads of this process: for environments that wait (for a server, a subprocess, a file).

    The steps of one session never overlap; those of different sessions do, so the environment's hooks must be
    thread-safe.
    A step that is given up is left running in its thread, which another one replaces; when it returns, its result is
    dropped and its session's state is forgotten.

    The threads are started when they are first needed and end with :meth:`close`, the ``with`` block, or the pool
    itself; a closed pool that is used again starts new ones. A pool that a rollout uses cannot be closed.
    """

    def __init__(self, num_workers: int) -> None:
        """Set the bound.

        Args:
            num_workers: Maximum number of steps that run at once.

        Raises:
            ConfigError: ``num_workers`` is not a positive int.
        """
        require("num_workers", num_workers, is_int(1), "a positive int")
        self.num_workers = num_workers
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._num_started = 0
        self._runs: set[_ThreadExecutor] = set()
        weakref.finalize(self, _end_threads, self._jobs, self._threads).atexit = False  # they end with the process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; one whose step was abandoned ends when the step returns.

        Raises:
            ConfigError: A rollout uses them.
        """
        if self._runs:
            raise ConfigError("an EnvThreadPool cannot be closed while a rollout uses it")
        _end_threads(self._jobs, self._threads)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def begin_run(self, scheduler: Scheduler[Any]) -> Executor:
        """Make the executor of one run.

        Raises:
            ConfigError: A step that runs in this pool begins the run.
        """
        if threading.current_thread() in self._threads:
            raise ConfigError("a step in an EnvThreadPool cannot wait for others in the same pool: use another pool")
        executor = _ThreadExecutor(self, scheduler, self._runs.discard)
        self._runs.add(executor)
        return executor

    def submit(self, job: _Job) -> None:
        """Queue a step for the next free thread."""
        while len(self._threads) < self.num_workers:
            self._start_thread()
        self._jobs.put(job)

    def give_up(self, job: _Job) -> bool:
        """Stop waiting for a step and replace its thread; returns whether the step still ran."""
        with job.lock:
            if job.phase is not _Phase.RUNNING or job.thread is None:
                return False
            job.phase = _Phase.GIVEN_UP
        self._threads.discard(job.thread)
        self._start_thread()
        return True

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name=f"agentsgym-environments-{self._num_started}", daemon=True
        )
        self._num_started += 1
        self._threads.add(thread)
        thread.start()


class _Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given up"


class _Job:
    """One step of one trial."""

    __slots__ = ("executor", "generator", "given", "index", "lock", "phase", "since", "thread")

    def __init__(self, executor: _ThreadExecutor, index: int, generator: TrialGenerator[Any], given: Input) -> None:
        self.executor = executor
        self.index = index
        self.generator = generator
        self.given = given
        self.phase = _Phase.WAITING
        self.since = 0.0
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def begin(self) -> bool:
        """Mark it as running; False if it was given up."""
        with self.lock:
            if self.phase is _Phase.GIVEN_UP:
                return False
            self.thread, self.since, self.phase = threading.current_thread(), time.monotonic(), _Phase.RUNNING
        return True

    def end(self) -> bool:
        """Mark it as done; False if it was given up."""
        with self.lock:
            if self.phase is _Phase.GIVEN_UP:
                return False
            self.phase = _Phase.DONE
        return True

    def drop(self) -> bool:
        """Give it up if it has not begun; returns whether it had not."""
        with self.lock:
            if self.phase is not _Phase.WAITING:
                return False
            self.phase = _Phase.GIVEN_UP
        return True


def _end_threads(jobs: SimpleQueue[_Job | None], threads: set[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)


def _run_jobs(jobs: SimpleQueue[_Job | None]) -> None:
    """Run one step after the other, until there are no more or this thread was replaced."""
    while (job := jobs.get()) is not None:
        outcome = None
        if job.begin():
            outcome = advance(job.generator, job.given)
            if not job.end():
                job.generator.close()
                return
            job.executor.done(job.index, outcome)
        del job, outcome  # an idle thread keeps no pool alive


class _ThreadExecutor:
    """One run's part of a pool."""

    max_live: int | None = None

    def __init__(
        self, pool: EnvThreadPool, scheduler: Scheduler[Any], on_close: Callable[[_ThreadExecutor], None]
    ) -> None:
        self._pool = pool
        self._on_close = on_close
        self._scheduler = scheduler
        self._generators: dict[int, TrialGenerator[Any]] = {}
        self._jobs: dict[int, _Job] = {}

    def done(self, index: int, outcome: TrialOutcome) -> None:
        """Report a step; called on the pool's threads."""
        self._scheduler.post(self._stepped, index, outcome)

    def advance(self, inputs: dict[int, Input]) -> None:
        """Submit all inputs."""
        for index, given in inputs.items():
            if index not in self._generators:
                self._generators[index] = self._scheduler.trials[index].play()
            self._jobs[index] = job = _Job(self, index, self._generators[index], given)
            self._pool.submit(job)
        inputs.clear()

    def running(self) -> list[tuple[int, float]]:
        """The steps in the pool's threads."""
        return [(index, job.since) for index, job in self._jobs.items() if job.phase is _Phase.RUNNING]

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Leave a step that runs to itself; do not begin one that waits."""
        job = self._jobs[index]
        has_begun = not job.drop()
        if not has_begun:
            job.generator.close()
        if not has_begun or self._pool.give_up(job):
            del self._jobs[index], self._generators[index]
            self._scheduler.stepped(index, Finished(self._scheduler.trials[index].abandon(error)))

    def close(self) -> None:
        """Close every generator: at once where no step runs, else when it returns."""
        running = [job for job in self._jobs.values() if not job.drop()]
        ending = time.monotonic() + GRACE_S
        while any(job.phase is _Phase.RUNNING for job in running) and time.monotonic() < ending:
            time.sleep(0.01)
        given_up = {job.index for job in running if self._pool.give_up(job)}
        for index in self._generators.keys() - given_up:
            self._generators[index].close()
        self._on_close(self)

    def _stepped(self, index: int, outcome: TrialOutcome) -> None:
        if self._jobs.pop(index, None) is not None:
            if isinstance(outcome, Finished | Raised):
                del self._generators[index]
            self._scheduler.stepped(index, outcome)
