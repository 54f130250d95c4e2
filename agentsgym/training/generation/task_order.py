"""The tasks of a run that plays ahead: task groups by number, and which of them have been trained on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from agentsgym.seeding import derive_seed


class TaskOrder:
    """Deals out task groups by number, every row once a pass, and remembers those that were trained on.

    Groups are trained on in another order than they begin, so that a run that goes on from a checkpoint begins with
    those that were still in play.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True) -> None:
        """Begin with group 0.

        Args:
            num_rows: Rows of the dataset.
            seed: Of the order; each pass has its own.
            shuffle: Whether rows are shuffled.
        """
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.reset()

    def reset(self, num_trained: int = 0) -> None:
        """Forget what was trained on, but for the first so many groups."""
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
        """The numbers that one of several ranks plays, in order and without end, as of now."""
        number, above = self._low, set(self._above)
        while True:
            if number % num_ranks == rank and number not in above:
                yield number
            number += 1

    def trained(self, numbers: Iterable[int]) -> None:
        """Note groups, of all ranks, that were trained on."""
        self._above.update(numbers)
        while self._low in self._above:
            self._above.remove(self._low)
            self._low += 1

    def state_dict(self) -> dict[str, Any]:
        """Give what was trained on, as JSON values."""
        return {"low": self._low, "above": sorted(self._above)}

    def load_state_dict(self, state: Any, /) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._low, self._above = int(state["low"]), set(state["above"])
