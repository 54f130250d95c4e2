"""Decide which task groups begin, and which of the finished ones are trained on next, so that none becomes too old.

An update is a generation batch that was trained on. A group that begins after u updates must be part of a batch formed
after at most ``u + max_staleness`` updates: its deadline. A batch has ``size`` groups, so only a limited number of them
can meet each deadline, and a group that could not does not begin. A batch consists of the groups that finished first,
but groups that are due come before them; while those are still being played, training waits. No group is ever dropped,
since dropping long ones would bias training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from agentsgym.envs.dataset_rows import DatasetRow
    from agentsgym.training.metrics.rollouts import RolloutSummary


class TaskSource(Protocol):
    """Draws tasks by the results so far: a :class:`~agentsgym.training.selection.curriculum.Curriculum`."""

    def bind(self, dataset: Any) -> None:
        """Set the rows to draw from."""

    def draw(self, *seed_parts: str | int) -> int:
        """Return the index of a row."""
        ...

    def record(self, rows: Sequence[DatasetRow], rollouts: Iterable[RolloutSummary]) -> None:
        """Record the results of rollouts."""


class TaskOrder:
    """Assigns rows to task groups by number, every row once per pass, and records which groups were trained on.

    Groups are not trained on in the order in which they begin, so a resumed run begins with those that were still being
    played.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True) -> None:
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.reset()

    def reset(self, num_trained: int = 0) -> None:
        """Forget which groups were trained on, except for the first ``num_trained``."""
        self._low = num_trained
        self._above: set[int] = set()

    def row(self, number: int) -> int:
        """The index of a group's row."""
        pass_index, place = divmod(number, self._num_rows)
        if not self._shuffle:
            return place
        if self._order[0] != pass_index:
            order = list(range(self._num_rows))
            random.Random(derive_seed("task order", self._seed, pass_index)).shuffle(order)
            self._order = pass_index, order
        return self._order[1][place]

    def untrained(self, rank: int, num_ranks: int) -> Iterator[int]:
        """Yield the numbers of the groups that a rank plays, in order and without end."""
        number, above = self._low, set(self._above)
        while True:
            if number % num_ranks == rank and number not in above:
                yield number
            number += 1

    def trained(self, numbers: Iterable[int]) -> None:
        """Record groups, from any rank, that were trained on."""
        self._above.update(numbers)
        while self._low in self._above:
            self._above.remove(self._low)
            self._low += 1

    def state_dict(self) -> dict[str, Any]:
        """Return which groups were trained on, as JSON values."""
        return {"low": self._low, "above": sorted(self._above)}

    def load_state_dict(self, state: Any, /) -> None:
        """Restore the state from :meth:`state_dict`."""
        self._low, self._above = int(state["low"]), set(state["above"])


@dataclass(slots=True)
class _Group:
    deadline: int
    num_live: int  # rollouts that are still being played
    finished: int | None = None  # its position in the order of finishing


class GroupsInFlight:
    """The task groups of one rank that have begun but were not trained on yet.

    Attributes:
        size: Number of groups in a batch.
        num_rollouts: Number of rollouts in a group.
        max_staleness: Maximum number of updates between a group's start and the batch that contains it.
    """

    def __init__(self, size: int, num_rollouts: int, max_staleness: int) -> None:
        self.size, self.num_rollouts, self.max_staleness = size, num_rollouts, max_staleness
        self._groups: dict[int, _Group] = {}
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_live(self) -> int:
        """The number of rollouts that are still being played."""
        return sum(group.num_live for group in self._groups.values())

    def may_begin(self, num_updates: int, next_batch: int, last_batch: int | None = None) -> bool:
        """Whether one more group may begin now.

        At most one batch of rollouts is live, and no group begins while a complete batch of finished groups waits,
        since it would only become staler.

        Args:
            num_updates: Number of updates that produced the weights with which it would begin.
            next_batch: Number of updates before the batch that is formed next.
            last_batch: Number of updates before the last batch of the run; None if unknown.
        """
        latest = num_updates + self.max_staleness
        latest = latest if last_batch is None else min(latest, last_batch)
        has_room = len(self._groups) < (latest - next_batch + 1) * self.size
        num_finished = sum(not group.num_live for group in self._groups.values())
        has_place = self.num_live <= (self.size - 1) * self.num_rollouts
        return has_room and has_place and num_finished < self.size

    def begin(self, number: int, num_updates: int) -> None:
        """Record that a group has begun with the weights after ``num_updates`` updates."""
        self._groups[number] = _Group(num_updates + self.max_staleness, self.num_rollouts)

    def finish(self, number: int) -> None:
        """Record that one more rollout of a group has finished."""
        group = self._groups[number]
        group.num_live -= 1
        if not group.num_live:
            group.finished = self._num_finished
            self._num_finished += 1

    def take(self, next_batch: int) -> list[int] | None:
        """Remove and return the groups of the batch formed after ``next_batch`` updates; None until it is complete.

        Returns:
            The numbers of ``size`` groups, in order.
        """
        by_finish = sorted(
            (group.finished, number) for number, group in self._groups.items() if group.finished is not None
        )
        chosen: list[int] = []
        for deadline in sorted({group.deadline for group in self._groups.values()}):
            due = {number for number, group in self._groups.items() if group.deadline <= deadline}
            num_later = max(0, deadline - next_batch) * self.size  # how many of these fit into later batches
            missing = len(due) - num_later - sum(number in due for number in chosen)
            ready = [number for _, number in by_finish if number in due and number not in chosen]
            if missing > len(ready):
                return None
            chosen += ready[: max(0, missing)]
        rest = [number for _, number in by_finish if number not in chosen]
        chosen += rest[: self.size - len(chosen)]
        if len(chosen) < self.size:
            return None
        for number in chosen:
            del self._groups[number]
        return sorted(chosen)
