"""Gather values over the ranks of a run. With a single rank, nothing is sent.

Every function here is collective unless noted otherwise: each rank calls it, in the same order.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import gather_object, reduce  # pyright: ignore[reportUnknownVariableType]
from datasets import IterableDataset

from agentsgym.errors import AgentsGymError

T = TypeVar("T")

_ABORTED: Final = "aborted"


class RolloutsAbortedError(Exception):
    """The rollouts of this generation batch were aborted on all ranks; no rollout failed."""


def process_state() -> Any:
    """Return accelerate's ``PartialState``, whose attributes it leaves untyped; not collective."""
    return PartialState()


def all_gather_objects(items: Sequence[T], error: Exception | None = None) -> list[T]:
    """Collective: the items of all ranks, in rank order, on every rank; ranks may have different numbers of them.

    Args:
        items: The items of this rank.
        error: The error of this rank, if any: it is raised here, and the other ranks raise one that names this rank.

    Raises:
        AgentsGymError: Another rank has an error, or an item of some rank cannot be pickled; every rank raises.
        RolloutsAbortedError: Some rank has this error, and no rank has any other error.
    """
    state = process_state()
    if error is None and state.num_processes == 1:
        return list(items)
    if state.num_processes > 1:
        parts: list[tuple[bytes, str]] = gather_object([_packed(items, error, state.process_index)])  # pyright: ignore[reportUnknownVariableType]
    else:
        parts = []
    if error is not None and not isinstance(error, RolloutsAbortedError):
        raise error
    if failures := [failure for _, failure in parts if failure not in {"", _ABORTED}]:
        raise AgentsGymError(failures[0])
    if error is not None or any(failure for _, failure in parts):
        raise RolloutsAbortedError from error
    return [item for data, _ in parts for item in pickle.loads(data)]


def _packed(items: Sequence[Any], error: Exception | None, rank: int) -> tuple[bytes, str]:
    if isinstance(error, RolloutsAbortedError):
        return b"", _ABORTED
    if error is not None:  # as text: an exception may not be picklable
        return b"", f"rank {rank} of the run failed: {type(error).__name__}: {error}"
    try:
        return pickle.dumps(list(items)), ""
    except Exception as problem:  # noqa: BLE001  # an error from pickling the items, which the waiting ranks must raise too
        return b"", f"the results of rank {rank} could not be pickled to send them to the other ranks: {problem!r}"


def gather_to_main(items: Sequence[T]) -> list[T]:
    """Collective: the items of all ranks, in rank order, on the main rank; only its own items on each other rank."""
    state = process_state()
    if state.num_processes == 1:
        return list(items)
    parts: list[Any] | None = [None] * state.num_processes if state.is_main_process else None
    dist.gather_object(list(items), parts)
    return list(items) if parts is None else [item for part in parts for item in part]


def any_rank(flag: torch.Tensor) -> bool:
    """Collective: whether a flag, a 0-dim bool tensor, is set on some rank; synchronizes with its device once."""
    if process_state().num_processes > 1:
        flag = cast("torch.Tensor", reduce(flag.to(process_state().device, torch.float32), reduction="sum"))
    return bool(flag)


def first_of_ranks(text: str) -> tuple[str, str]:
    """Collective: the first rank whose text is not empty, as a string ("" with a single rank), and that text."""
    texts = all_gather_objects([text])
    rank = next((rank for rank, found in enumerate(texts) if found), 0)
    return str(rank) if len(texts) > 1 else "", texts[rank]


@contextlib.contextmanager
def raise_on_all_ranks() -> Generator[None]:
    """Collective: raise on all ranks if any rank raises in the ``with`` block, so that no rank waits for it forever.

    Raises:
        AgentsGymError: Another rank failed; the failing rank raises its own error.
    """
    error = DeferredError()
    with error.capturing():
        yield
    all_gather_objects((), error.first)


class DeferredError:
    """The first error of this rank, kept until :func:`all_gather_objects` raises it on all ranks.

    Until then the rank keeps taking part in collective calls. (Not collective.)
    """

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextlib.contextmanager
    def capturing(self) -> Generator[None]:
        """Capture an exception raised in the ``with`` block."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # raised at the next gather
            self.first = self.first or error


@contextlib.contextmanager
def count_real_rollouts(dataloader: Any, num_rollouts: int) -> Generator[Callable[[], int | None]]:
    """Count the rollouts of an evaluation, excluding those that only pad its last batch; not collective.

    The last batch is padded with rows of the first batch, which are played but not counted.

    Args:
        dataloader: The evaluation's data loader.
        num_rollouts: Number of rollouts per row, if the dataset is not a stream.

    Yields:
        A function that returns the count once all batches are played, or None if no rollouts are padding.
    """
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDatasetShard):
        stream = _CountedStream(dataset.dataset)  # pyright: ignore[reportUnknownMemberType]
        dataset.dataset = stream  # pyright: ignore[reportAttributeAccessIssue]  # has everything that the shard reads
        try:
            yield lambda: stream.count
        finally:
            dataset.dataset = stream.rows
    elif isinstance(dataset, IterableDataset):
        yield lambda: None
    else:
        yield lambda: len(dataset) * num_rollouts


class _CountedStream:
    """A stream that counts the rows it yields."""

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
