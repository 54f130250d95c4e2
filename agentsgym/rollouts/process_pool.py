"""Run environments in worker processes, with each session in a single process."""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_positive_number, or_none, require
from agentsgym.rollouts.process_executor import ProcessExecutor
from agentsgym.rollouts.scheduler import Executor, Scheduler
from agentsgym.rollouts.worker_set import WorkerLimits, WorkerSet
from agentsgym.rollouts.workers.handle import WorkerHandle


class EnvProcessPool(AbstractContextManager["EnvProcessPool"]):
    """Advances trials in processes: for environments that compute, or that may hang or crash.

    A session stays in one process from start to end; the agent runs in the process that owns the pool. The environment
    must be picklable: it is sent to each process at most once per run, and only if the process does not have it yet.
    Changes that its hooks make to it remain local to the process.

    A process is replaced if it dies, if one of its steps is abandoned, or if it sends invalid messages. Its other
    sessions are replayed from their recorded actions, with the same result, because environments draw random numbers
    only from their sessions' generators. A session fails only if it is known to be the cause: one of its steps took too
    long, or its process died and had never run another session. Therefore, a session that was being stepped when a
    shared process died is retried alone.

    Processes are not forked from this one, so they are safe with threads and accelerators. As with all such processes
    in Python, a script must start them under ``if __name__ == "__main__":``, since each process imports it, and an
    environment defined in a notebook must be moved to a module.

    The processes are started on demand. They end on :meth:`close`, at the end of the ``with`` block, when the pool is
    garbage-collected, or within seconds of the end of the process that owns the pool. A closed pool can be used again
    and then starts new processes. Only one rollout at a time can use a pool.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_sessions_per_worker: int | None = 32,
        max_memory_mb: float | None = None,
        recycle_after_episodes: int | None = None,
        recycle_above_mb: float | None = None,
    ) -> None:
        """Create the pool; processes are started when they are needed.

        Args:
            num_workers: Number of processes.
            max_sessions_per_worker: Maximum number of concurrent sessions in a process, and thus of sessions that are
                replayed if one of them crashes it; additional sessions wait. None for any number.
            max_memory_mb: Memory in megabytes (10^6 bytes) above which a process is replaced. It is measured ten times
                per second as the resident set, which includes memory shared by all processes. A session fails if it
                exceeds the limit when it is alone in a process. None for no limit.
            recycle_after_episodes: Number of finished sessions after which a process receives no new ones, and is
                replaced when it is empty. None for never.
            recycle_above_mb: The same for a process that uses more than this many megabytes at the end of one of its
                sessions: for environments that leak memory. None for never.

        Raises:
            ConfigError: A value is not a positive int or a positive number.
        """
        require("num_workers", num_workers, is_int(1), "a positive int")
        for name, count in (
            ("max_sessions_per_worker", max_sessions_per_worker),
            ("recycle_after_episodes", recycle_after_episodes),
        ):
            require(name, count, or_none(is_int(1)), "a positive int or None")
        for name, size in (("max_memory_mb", max_memory_mb), ("recycle_above_mb", recycle_above_mb)):
            require(name, size, or_none(is_positive_number), "a positive number of megabytes or None")
        self.num_workers = num_workers
        self.limits = WorkerLimits(
            max_sessions=max_sessions_per_worker,
            max_memory_mb=max_memory_mb,
            recycle_after_episodes=recycle_after_episodes,
            recycle_above_mb=recycle_above_mb,
        )
        self._workers = WorkerSet(num_workers)
        self._in_use = threading.Lock()
        weakref.finalize(self, self._workers.request_shutdown).atexit = False  # they end with their owner

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_live(self) -> int | None:
        """The maximum number of live sessions; None for any number."""
        most = self.limits.max_sessions
        return None if most is None else most * self.num_workers

    def close(self) -> None:
        """End the processes.

        Raises:
            ConfigError: A rollout is using the pool.
        """
        if self._in_use.locked():
            raise ConfigError("an EnvProcessPool cannot be closed while a rollout uses it")
        self._workers.close()

    def begin_run(self, scheduler: Scheduler[Any]) -> Executor:
        """Make the executor of one run.

        Raises:
            ConfigError: The pool is in use.
        """
        if not self._in_use.acquire(blocking=False):
            raise ConfigError("an EnvProcessPool plays one rollout at a time, but this one is in use: create another")
        try:
            executor = ProcessExecutor(self._workers, self.limits, scheduler, self._in_use.release)
            self._workers.start(executor.on_message)
        except BaseException:
            self._in_use.release()
            raise
        return executor

    def workers(self) -> list[WorkerHandle]:
        """The processes."""
        return self._workers.handles
