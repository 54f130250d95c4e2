"""What an evaluation inside training leaves as it was, and which of the rollouts that its ranks play count."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from datasets import IterableDataset


@contextlib.contextmanager
def untouched_global_generators() -> Generator[None]:
    """Set the generators of Python, NumPy and torch back to where they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def counted_rollouts(dataloader: Any, num_rollouts: int) -> Generator[Callable[[], int | None]]:
    """Give what tells, once the batches are played, how many rollouts an evaluation has.

    Ranks fill the last batch with rows of the first, so that each has equally many: those are played and do not count.

    Args:
        dataloader: Of the evaluation.
        num_rollouts: How many rows each task of a dataset that is no stream becomes.

    Yields:
        A function that returns the number, or None where all of them count.
    """
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDatasetShard):
        stream = _Counted(dataset.dataset)
        dataset.dataset = stream  # pyright: ignore[reportAttributeAccessIssue]  # all that it asks for is there
        try:
            yield lambda: stream.count
        finally:
            dataset.dataset = stream.rows
    elif isinstance(dataset, IterableDataset):
        yield lambda: None
    else:
        yield lambda: len(dataset) * num_rollouts


class _Counted:
    """A stream that knows how many rows it has given."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for row in self.rows:
            self.count += 1
            yield row

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)
