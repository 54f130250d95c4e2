"""What the ranks of a run tell each other. With one rank nothing is sent and everything is as it was.

Every function here is collective: each rank calls it, in the same order.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Generator, Sequence
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from agentsgym.errors import AgentsGymError

T = TypeVar("T")


def gathered(items: Sequence[T]) -> list[T]:
    """The items of all ranks, in rank order, on every rank; the ranks may hold different numbers of them.

    Raises:
        AgentsGymError: An item of some rank cannot be pickled; every rank raises it.
    """
    state = PartialState()
    if state.num_processes == 1:
        return list(items)
    try:
        part = pickle.dumps(list(items)), ""
    except Exception as error:  # noqa: BLE001  # the items' own; whoever waits for them must learn of it
        part = b"", f"what rank {state.process_index} played cannot be sent to the other ranks: {error!r}"
    parts: list[tuple[bytes, str]] = gather_object([part])
    if complaints := [complaint for _, complaint in parts if complaint]:
        raise AgentsGymError(complaints[0])
    return [item for data, _ in parts for item in pickle.loads(data)]


def num_before(num_items: int) -> int:
    """How many items the ranks before this one hold together, so that item i here is item ``num_before + i`` of all."""
    counts = gathered([num_items])
    return sum(counts[: PartialState().process_index])


class _Failure:
    """What went wrong on one rank, as text: an exception need not survive being sent."""

    def __init__(self, rank: int, error: Exception) -> None:
        self.rank = rank
        self.text = f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def raised_together() -> Generator[None]:
    """Let an error that is raised inside on any rank end the work on all of them: none is left waiting for it.

    Raises:
        AgentsGymError: Another rank failed; the rank that did raises its own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001  # raised again below, when the other ranks know
        error = raised
    rank = PartialState().process_index
    failures = gathered([] if error is None else [_Failure(rank, error)])
    if error is not None:
        raise error
    if failures:
        raise AgentsGymError(f"rank {failures[0].rank} of the run failed: {failures[0].text}")
