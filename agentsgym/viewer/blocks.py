"""Read rollouts of a store in any order, a block of neighbors at a time, of which the last are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from agentsgym.store.rows import record_of

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore
    from agentsgym.store.records import StoredRollout

_SIZE: Final = 128  # rollouts, as in the row group of a part
_MOST_BYTES: Final = 256 << 20


class Blocks:
    """The rollouts of a store by their place in the folder; any thread may ask."""

    def __init__(self, store: RolloutStore) -> None:
        """Read nothing yet.

        Args:
            store: Any part of the folder.
        """
        self._whole = store.whole
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, row: int) -> StoredRollout:
        """Read one rollout.

        Raises:
            StoreError: Its file is gone, or damaged.
        """
        return record_of(self._block(row // _SIZE), row % _SIZE)

    def records(self, rows: Iterable[int]) -> list[StoredRollout]:
        """Read some."""
        return [self.record(row) for row in rows]

    def _block(self, index: int) -> Any:
        with self._lock:
            block = self._kept.get(index)
            if block is None:
                block = self._whole[index * _SIZE : (index + 1) * _SIZE].table().combine_chunks()
                self._kept[index] = block
            self._kept.move_to_end(index)
            while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _MOST_BYTES:
                self._kept.popitem(last=False)
        return block
