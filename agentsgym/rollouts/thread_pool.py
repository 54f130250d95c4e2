"""Run environments whose steps block in a bounded number of threads of this process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import Any

from agentsgym.errors import ConfigError, EpisodeError
from agentsgym.fields import is_int, require
from agentsgym.rollouts.scheduler import (
    GRACE_S,
    Executor,
    Finished,
    Input,
    Raised,
    Scheduler,
    TrialGenerator,
    TrialOutcome,
    advance,
)


class EnvThreadPool(AbstractContextManager["EnvThreadPool"]):
    """Advances trials in threads of this process: for environments that block on I/O (a server, a subprocess, a file).

    The steps of one session never overlap; steps of different sessions do, so the environment's hooks must be
    thread-safe.
    A step that exceeds its time limit keeps running in its thread, and a new thread takes that thread's place in the
    pool; when the step returns, its result is discarded and its session is closed.

    The threads are started on demand. They end on :meth:`close`, at the end of the ``with`` block, or when the pool is
    garbage-collected; a closed pool can be used again and then starts new threads. A pool cannot be closed while a
    rollout uses it.
    """

    def __init__(self, num_workers: int) -> None:
        """Create the pool; threads are started when they are needed.

        Args:
            num_workers: Maximum number of steps that run concurrently.

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; the thread of an abandoned step ends when the step returns.

        Raises:
            ConfigError: A rollout is using the pool.
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
            ConfigError: The run is started from within a step that itself runs in this pool.
        """
        if threading.current_thread() in self._threads:
            raise ConfigError(
                "a step that runs in an EnvThreadPool cannot start a rollout in the same pool, since it could "
                "deadlock: use another pool"
            )
        executor = _ThreadExecutor(self, scheduler, self._runs.discard)
        self._runs.add(executor)
        return executor

    def submit(self, job: _Job) -> None:
        """Queue a step for the next free thread."""
        while len(self._threads) < self.num_workers:
            self._start_thread()
        self._jobs.put(job)

    def give_up(self, job: _Job) -> bool:
        """Stop waiting for a step and replace its thread; return whether the step was still running."""
        if job.thread is None or not job.change(_Phase.RUNNING, _Phase.GIVEN_UP):
            return False
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


@dataclass(slots=True, eq=False)
class _Job:
    """One step of one trial."""

    executor: _ThreadExecutor
    index: int
    generator: TrialGenerator[Any]
    given: Input
    phase: _Phase = _Phase.WAITING
    since: float = 0.0
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, before: _Phase, after: _Phase) -> bool:
        """Change the phase; return False if it is another one than ``before``."""
        with self.lock:
            if self.phase is not before:
                return False
            self.phase = after
        return True

    def drop(self) -> bool:
        """Cancel the job if it has not started; return whether it was canceled."""
        return self.change(_Phase.WAITING, _Phase.GIVEN_UP)


def _end_threads(jobs: SimpleQueue[_Job | None], threads: set[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)


def _run_jobs(jobs: SimpleQueue[_Job | None]) -> None:
    """Run steps until the pool is closed or this thread is replaced."""
    while (job := jobs.get()) is not None:
        outcome = None
        job.thread, job.since = threading.current_thread(), time.monotonic()
        if job.change(_Phase.WAITING, _Phase.RUNNING):
            outcome = advance(job.generator, job.given)
            if not job.change(_Phase.RUNNING, _Phase.DONE):
                job.generator.close()
                return
            job.executor.done(job.index, outcome)
        del job, outcome  # otherwise an idle thread would keep the pool alive


class _ThreadExecutor(Executor):
    def __init__(
        self, pool: EnvThreadPool, scheduler: Scheduler[Any], on_close: Callable[[_ThreadExecutor], None]
    ) -> None:
        self._pool = pool
        self._on_close = on_close
        self._scheduler = scheduler
        self._generators: dict[int, TrialGenerator[Any]] = {}
        self._jobs: dict[int, _Job] = {}

    def done(self, index: int, outcome: TrialOutcome) -> None:
        """Report the outcome of a step; called on the pool's threads."""
        self._scheduler.post(self._stepped, index, outcome)

    def advance(self, inputs: dict[int, Input]) -> None:
        """Submit all inputs."""
        self._scheduler.expect(inputs)
        for index, given in inputs.items():
            if index not in self._generators:
                self._generators[index] = self._scheduler.trials[index].play()
            self._jobs[index] = job = _Job(self, index, self._generators[index], given)
            self._pool.submit(job)
        inputs.clear()

    def running(self) -> list[tuple[int, float]]:
        """The trials whose steps are running, and since when."""
        return [(index, job.since) for index, job in self._jobs.items() if job.phase is _Phase.RUNNING]

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Let a running step run on in its thread; do not start one that is still queued."""
        job = self._jobs[index]
        has_begun = not job.drop()
        if not has_begun:
            job.generator.close()
        if not has_begun or self._pool.give_up(job):
            del self._jobs[index], self._generators[index]
            self._scheduler.on_outcome(index, Finished(self._scheduler.trials[index].abandon(error)))

    def close(self) -> None:
        """Close every generator: now if no step is running in it, otherwise when the step returns."""
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
            self._scheduler.on_outcome(index, outcome)
