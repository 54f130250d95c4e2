"""Play task groups without pause while the policy is trained, and return a batch as soon as it is complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentsgym.envs.finished import FinishedRollouts
from agentsgym.envs.play import prepare_play, retry_of
from agentsgym.rollouts.stream import TrialStream

if TYPE_CHECKING:
    from agentsgym.envs.dataset_rows import DatasetRow
    from agentsgym.envs.trial import Trial
    from agentsgym.failure_policy import FailurePolicy
    from agentsgym.training.generation.in_flight import GroupsInFlight
    from agentsgym.types import Trajectory

_POLL_S = 0.25  # between two checks for a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A task group.

    Attributes:
        number: Position of the group in the task order.
        row_index: Index of its row in the dataset.
        row: The row.
        trials: Its rollouts, not yet started.
    """

    number: int
    row_index: int
    row: DatasetRow
    trials: Sequence[Trial]


PlayedGroup = tuple[Group, "Sequence[Trajectory]"]
"""A task group that was played, and its rollouts in the order of their trials."""


class RolloutsAhead:
    """Plays the task groups of one rank in a thread, until it is closed.

    Attributes:
        waited_s: Seconds for which :meth:`take` waited for the latest batch.
    """

    def __init__(
        self,
        in_flight: GroupsInFlight,
        groups: Iterator[Group],
        agent: Any,
        *,
        policy: FailurePolicy,
        num_batches: int | None = None,
        **options: Any,
    ) -> None:
        """Start the thread; no group begins yet.

        Args:
            in_flight: Decides which groups begin and which are trained on.
            groups: The groups to play, in order.
            agent: The agent that acts.
            policy: Determines how often a failed rollout is retried.
            num_batches: Number of generation batches in the run; None if unknown.
            **options: See :class:`~agentsgym.rollouts.stream.TrialStream`.
        """
        self.waited_s = 0.0
        self._in_flight, self._groups = in_flight, groups
        self._policy, self._num_batches = policy, num_batches
        self._num_live, self._pool = in_flight.size * in_flight.num_rollouts, options.get("pool")
        self._begun: dict[int, Group] = {}
        self._places: dict[str, tuple[int, int, Trial]] = {}  # by session: group number, index in the group, trial
        self._played: dict[int, dict[int, Trajectory]] = {}
        self._prepared: set[int] = set()
        self._num_updates = self._next_batch = 0
        self._changed = threading.Condition()
        self._agent, self._hooks = agent, FinishedRollouts(self._went_through, self._take_later)
        self._stream = TrialStream(agent, self._finished, max_concurrent=self._num_live, **options)

    def take(self, num_updates: int, interrupt: Callable[[], None]) -> list[PlayedGroup]:
        """Wait for a batch; call this once the sampler has the newest weights. Other groups are played meanwhile.

        Args:
            num_updates: Number of generation batches that were trained on.
            interrupt: Called a few times per second; its exceptions are raised here, and the rollouts continue.

        Raises:
            AgentsGymError: The rollouts failed.
        """
        since = time.monotonic()
        with self._changed:
            self._num_updates = self._next_batch = num_updates
            self._prepared.clear()
            self._begin()
            while (numbers := self._in_flight.take(num_updates)) is None:
                self._stream.check()
                interrupt()
                self._changed.wait(_POLL_S)
            self._next_batch += 1
            self._begin()
            self.waited_s = time.monotonic() - since
            taken: list[PlayedGroup] = []
            for number in numbers:
                played = self._played.pop(number)
                taken.append((self._begun.pop(number), [played[index] for index in range(len(played))]))
            return taken

    @property
    def num_updates(self) -> int:
        """The number of generation batches that were trained on."""
        return self._num_updates

    def no_new_groups(self) -> AbstractContextManager[Any]:
        """Return a context in which no group begins, since its draw may depend on values that are being changed."""
        return self._changed

    def close(self) -> None:
        """Drop the rollouts in progress, and end the thread."""
        self._stream.close()
        with self._changed:
            self._hooks.close()

    def _begin(self) -> None:
        """Begin as many groups as possible."""
        last = None if self._num_batches is None else self._num_batches - 1
        while self._in_flight.may_begin(self._num_updates, self._next_batch, last):
            group = next(self._groups)
            self._in_flight.begin(group.number, self._num_updates)
            self._begun[group.number], self._played[group.number] = group, {}
            for index, trial in enumerate(group.trials):
                self._places[trial.session_id] = group.number, index, trial
            # Environments are prepared before their first group in each batch, for the maximum number of live episodes.
            new = [trial for trial in group.trials if id(trial.env) not in self._prepared]
            self._prepared.update(id(trial.env) for trial in new)
            if new:
                prepare_play(new, max_concurrent=self._num_live, pool=self._pool, num_live=self._num_live)
            self._hooks.expect(group.trials, self._agent)
            self._stream.add(group.trials)

    def _take_later(self) -> None:
        self._stream.post(self._take)

    # On the stream's thread

    def _finished(self, trajectory: Trajectory) -> None:
        with self._changed:
            _, _, trial = self._places[trajectory.session_id]
            self._hooks.add(trial.env, trajectory, may_retry=trial.num_retries < self._policy.max_retries)

    def _take(self) -> None:
        with self._changed:
            self._hooks.take()

    def _went_through(self, trajectory: Trajectory, may_retry: bool) -> None:
        number, index, trial = self._places.pop(trajectory.session_id)
        if trajectory.failed and may_retry:
            trial = retry_of(trial, self._policy)
            self._places[trial.session_id] = number, index, trial
            self._stream.add([trial])
            return
        self._played[number][index] = trajectory
        self._in_flight.finish(number)
        self._begin()
        self._changed.notify_all()
