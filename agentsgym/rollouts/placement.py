"""Which worker process a trial lives in, and which trials wait for a place in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentsgym.rollouts.remote_trial import RemoteTrial
from agentsgym.rollouts.workers.handle import WorkerHandle


class Placement:
    """The trials that wait for a place.

    A trial shares a process with no more than its own and its neighbors' ``company`` allow. Suspects come first, each
    into an empty process; where there is none, the one with the fewest trials is kept for it and gets no others.
    """

    def __init__(self, trials: Mapping[int, RemoteTrial]) -> None:
        """Begin with nothing that waits.

        Args:
            trials: All trials of the run that are in play, by index, as they are at any time.
        """
        self._trials = trials
        self.waiting: list[RemoteTrial] = []

    def place(self, workers: Sequence[WorkerHandle]) -> Iterator[tuple[RemoteTrial, WorkerHandle]]:
        """Give each trial that waits a place where there is one; whoever iterates moves it in."""
        self.waiting.sort(key=lambda trial: 0 if trial.is_suspect else trial.company)
        is_open = [worker for worker in workers if not (worker.is_draining or worker.is_killed or worker.is_dead)]
        still_waiting: list[RemoteTrial] = []
        for trial in self.waiting:
            is_open.sort(key=lambda worker: len(worker.residents))
            worker = next((one for one in is_open if len(one.residents) < self._room(one, trial)), None)
            if worker is None:
                still_waiting.append(trial)
            else:
                yield trial, worker
            if worker is None or trial.is_suspect:
                del is_open[:1]  # the one that is kept for it, or that it is alone in: both have the fewest trials
        self.waiting = still_waiting

    def _room(self, worker: WorkerHandle, trial: RemoteTrial) -> int:
        """How many trials may live in a process, this one among them."""
        everyone = [trial, *(self._trials[index] for index in worker.residents)]
        return min(1 if one.is_suspect else one.company for one in everyone)
