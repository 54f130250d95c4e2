"""The processes of a pool: started, replaced, ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentsgym.rollouts.workers.handle import WorkerHandle
from agentsgym.rollouts.workers.memory import resident_mb

OnMessage = Callable[[WorkerHandle, bytes | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What the processes of a pool may take; None is no limit.

    Attributes:
        max_sessions: Sessions that live in a process at once.
        max_memory_mb: Megabytes that a process may hold.
        recycle_after_episodes: Sessions after whose end a process is replaced.
        recycle_above_mb: Megabytes above which a process is replaced once it has no session any more.
    """

    max_sessions: int | None = None
    max_memory_mb: float | None = None
    recycle_after_episodes: int | None = None
    recycle_above_mb: float | None = None

    def is_worn(self, worker: WorkerHandle) -> bool:
        """Whether a process is to be replaced, now that one of its sessions is over."""
        if self.recycle_after_episodes is not None and worker.num_ended >= self.recycle_after_episodes:
            return True
        if self.recycle_above_mb is None:
            return False
        return (resident_mb(worker.process.pid) or 0.0) > self.recycle_above_mb


class WorkerSet:
    """The processes of a pool.

    Attributes:
        size: How many there are to be.
        handles: Those that there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.handles: list[WorkerHandle] = []

    def start(self, on_message: OnMessage) -> None:
        """Start those that are missing, and replace those that are dead or worn."""
        while len(self.handles) < self.size:
            self.handles.append(WorkerHandle(on_message))
        for worker in [*self.handles]:
            worker.on_message = on_message  # first, so that a death from now on is reported
            if worker.is_dead or worker.is_draining:
                self.replace(worker, on_message)

    def replace(self, worker: WorkerHandle, on_message: OnMessage) -> WorkerHandle:
        """Put a new process in the place of one that is dead, or idle and to end by itself."""
        worker.on_message = None
        worker.request_shutdown()
        place = self.handles.index(worker)
        self.handles[place] = WorkerHandle(on_message)
        return self.handles[place]

    def request_shutdown(self) -> None:
        """Ask all to end, without waiting for them."""
        for worker in self.handles:
            worker.on_message = None
            worker.request_shutdown()

    def close(self) -> None:
        """End all."""
        self.request_shutdown()
        for worker in self.handles:
            worker.end()
        self.handles.clear()
