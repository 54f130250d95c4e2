"""Start, replace and end the processes of a pool, and assign trials to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentsgym.rollouts.remote_trial import RemoteTrial
from agentsgym.rollouts.workers.handle import WorkerHandle, resident_mb


def place(
    waiting: list[RemoteTrial], workers: Sequence[WorkerHandle], trials: Mapping[int, RemoteTrial]
) -> Iterator[tuple[RemoteTrial, WorkerHandle]]:
    """Assign a worker with room to each waiting trial, if there is one; the caller of this iterator starts the trial.

    The number of trials in a process is limited by the ``max_residents`` of each. Suspects come first, each in an empty
    process; if there is none, the process with the fewest trials is reserved for the suspect and gets no others.

    Args:
        waiting: The trials that wait for a worker; afterwards, the trials that still wait.
        workers: The processes.
        trials: All live trials of the run by index.
    """
    waiting.sort(key=lambda trial: 0 if trial.is_suspect else trial.max_residents)
    candidates = [worker for worker in workers if not (worker.is_draining or worker.is_killed or worker.is_dead)]
    still_waiting: list[RemoteTrial] = []
    for trial in waiting:
        candidates.sort(key=lambda worker: len(worker.residents))
        worker = next((one for one in candidates if len(one.residents) < _room(one, trial, trials)), None)
        if worker is None:
            still_waiting.append(trial)
        else:
            yield trial, worker
        if worker is None or trial.is_suspect:
            del candidates[:1]  # the one with the fewest trials is reserved for this trial, or occupied by it alone
    waiting[:] = still_waiting


def _room(worker: WorkerHandle, trial: RemoteTrial, trials: Mapping[int, RemoteTrial]) -> int:
    """The maximum number of trials in a process, including this one."""
    everyone = [trial, *(trials[index] for index in worker.residents)]
    return min(1 if one.is_suspect else one.max_residents for one in everyone)


OnMessage = Callable[[WorkerHandle, bytes | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """The limits of a pool's processes; None for no limit.

    Attributes:
        max_sessions: Maximum number of concurrent sessions in a process.
        max_memory_mb: Maximum memory of a process in megabytes.
        recycle_after_episodes: Number of finished sessions after which a process is replaced.
        recycle_above_mb: Memory in megabytes above which a process is replaced once it has no sessions left.
    """

    max_sessions: int | None = None
    max_memory_mb: float | None = None
    recycle_after_episodes: int | None = None
    recycle_above_mb: float | None = None

    def is_worn(self, worker: WorkerHandle) -> bool:
        """Whether a process should be replaced, now that one of its sessions is over."""
        if self.recycle_after_episodes is not None and worker.num_ended >= self.recycle_after_episodes:
            return True
        if self.recycle_above_mb is None:
            return False
        return (resident_mb(worker.process.pid) or 0.0) > self.recycle_above_mb


class WorkerSet:
    """The processes of a pool.

    Attributes:
        size: Number of workers.
        handles: The current workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.handles: list[WorkerHandle] = []

    def start(self, on_message: OnMessage) -> None:
        """Start missing processes, and replace those that are dead or draining."""
        while len(self.handles) < self.size:
            self.handles.append(WorkerHandle(on_message))
        for worker in [*self.handles]:
            worker.on_message = on_message  # set first, so that a later death is reported
            if worker.is_dead or worker.is_draining:
                self.replace(worker, on_message)

    def replace(self, worker: WorkerHandle, on_message: OnMessage) -> WorkerHandle:
        """Replace a process that is dead, or idle and no longer needed, with a new one."""
        worker.on_message = None
        worker.request_shutdown()
        index = self.handles.index(worker)
        self.handles[index] = WorkerHandle(on_message)
        return self.handles[index]

    def request_shutdown(self) -> None:
        """Request the shutdown of all processes, without waiting for it."""
        for worker in self.handles:
            worker.on_message = None
            worker.request_shutdown()

    def close(self) -> None:
        """End all processes."""
        self.request_shutdown()
        for worker in self.handles:
            worker.end()
        self.handles.clear()
