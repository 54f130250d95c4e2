"""Run environments in worker processes, each session in one of them."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any, Self

from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_positive_number, or_none, require
from agentsgym.rollouts.interfaces import Executor
from agentsgym.rollouts.process_executor import ProcessExecutor
from agentsgym.rollouts.scheduler import Scheduler
from agentsgym.rollouts.worker_set import WorkerLimits, WorkerSet
from agentsgym.rollouts.workers.handle import WorkerHandle


class EnvProcessPool:
    """Advances trials in processes: for environments that compute, or that may hang or crash.

    A session lives in one process from its start to its end; the agent answers in the process that owns the pool. The
    environment must be picklable: it is sent to each process at most once per run, and only if the process does not
    have it already. What its hooks change on it in a process stays there.

    A process that dies, whose step is abandoned, or that sends invalid messages, is replaced. Its other sessions are
    replayed from their recorded actions, with the same result, because environments draw only from their sessions'
    generators. A session fails only if it is known to be the cause: one of its steps took too long, or its process died
    and had never held another session. So a session that was being stepped when a shared process died is tried alone.

    Processes are spawned, not forked, so that they are safe beside threads and accelerators. As everywhere in Python, a
    script must start them below ``if __name__ == "__main__":``, since each process imports it, and an environment
    defined in a notebook must be moved to a module.

    The processes are started when they are first needed and end with :meth:`close`, the ``with`` block, or the pool
    itself; a closed pool that is used again starts new ones. They end within seconds of the process that owns the pool.
    One rollout uses a pool at a time.
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
        """Set the number of processes; none is started.

        Args:
            num_workers: Number of processes.
            max_sessions_per_worker: Maximum number of sessions in a process at once, and so of sessions that are played
                again if one of them breaks it; further sessions wait for a place. None for any number.
            max_memory_mb: Megabytes (10^6 bytes) of memory above which a process is replaced, measured ten times a
                second as its resident set, which includes what all processes share. A session fails if it passes
                the limit alone. None for no limit.
            recycle_after_episodes: Number of ended sessions after which a process gets no new ones, and is replaced
                when it is empty. None for never.
            recycle_above_mb: The same for a process that uses more than this many megabytes when one of its sessions
                ends: for environments that leak. None for never.

        Raises:
            ConfigError: A value is not a positive int, or not a positive number.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def max_live(self) -> int | None:
        """The most sessions that are live at once; None for any number."""
        most = self.limits.max_sessions
        return None if most is None else most * self.num_workers

    def close(self) -> None:
        """End the processes.

        Raises:
            ConfigError: A rollout uses them.
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
