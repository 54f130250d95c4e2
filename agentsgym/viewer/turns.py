"""Numeric summaries of every turn of many rollouts, for the curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from agentsgym.store.rows import record_from_row
from agentsgym.viewer.plain import mean_of, number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentsgym.store.reader import RolloutStore
    from agentsgym.store.records import StoredRollout

_PER_READ: Final = 1024  # rollouts whose tokens are in memory at the same time
_MEANS: Final = {"advantages": "advantages", "surprisals": "logprobs", "entropies": "entropies"}


def turn_summaries(store: RolloutStore) -> dict[str, Any]:
    """Return each turn's reward, validity, and means over its tokens, for each rollout, (N, K).

    Raises:
        StoreError: A file is missing or damaged.
    """
    found: dict[str, list[Any]] = {
        name: [] for name in ("row", "rewards", "advantages", "surprisals", "entropies", "invalid")
    }
    found["row"] += store.rows
    for begin in range(0, len(store), _PER_READ):
        part = store[begin : begin + _PER_READ]
        table: Any = part.table(["turns", "corrections", *_MEANS.values()]).combine_chunks()
        columns = _columns(table)
        for index, corrected in enumerate(table.column("corrections").to_pylist()):
            if corrected is not None:  # the columns do not represent it exactly
                for name, values in _values_of(record_from_row(part[index : index + 1].table(), 0)).items():
                    columns[name][index] = values
        for name, values in columns.items():
            found[name] += values
    return found


def _columns(table: Any) -> dict[str, list[Any]]:
    turns = _Lists(table.column("turns"))
    starts, stops = (turns.flat.field(name).to_numpy() for name in ("start", "stop"))
    rewards = [number(value) for value in turns.flat.field("reward").to_pylist()]
    invalid = [int(value) for value in turns.flat.field("invalid").to_pylist()]
    found: dict[str, list[Any]] = {"rewards": turns.nested(rewards), "invalid": turns.nested(invalid)}
    for name, column in _MEANS.items():
        values = _Lists(table.column(column))
        owner = np.repeat(np.arange(len(turns.is_known)), np.diff(turns.offsets))
        first = values.offsets[:-1][owner]
        is_known = values.is_known[owner]
        sign = -1.0 if name == "surprisals" else 1.0
        with np.errstate(invalid="ignore", over="ignore"):  # some values may be infinite
            means = _means(values.flat.to_numpy(zero_copy_only=False) * sign, first + starts, first + stops, is_known)
        nested = turns.nested([number(one) for one in means.tolist()])
        found[name] = [own if known else None for own, known in zip(nested, values.is_known, strict=True)]
    return found


class _Lists:
    """A column of lists: its concatenated values, and the offset of each list."""

    def __init__(self, chunks: Any) -> None:
        column = chunks.combine_chunks()
        self.flat = column.flatten()
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.is_known: NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)

    def nested(self, values: Sequence[Any]) -> list[list[Any]]:
        """Split values, one per value of the column, into lists with the lengths of the column's lists."""
        ends = self.offsets.tolist()
        return [[*values[begin:end]] for begin, end in itertools.pairwise(ends)]


def _means(
    values: NDArray[np.float64], starts: NDArray[np.int64], stops: NDArray[np.int64], is_known: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the mean of the known values in each span; NaN if there are none."""
    found = np.full(len(starts), math.nan)
    some = is_known & (stops > starts)
    if not some.any():
        return found
    edges = np.minimum(np.stack([starts[some], stops[some]], axis=1).ravel(), len(values))
    is_nan = np.isnan(values)
    sums = np.add.reduceat(np.append(np.where(is_nan, 0.0, values), 0.0), edges)[::2]
    counts = np.add.reduceat(np.append(~is_nan, [False]).astype(np.int64), edges)[::2]
    found[some] = np.divide(sums, counts, out=np.full(len(sums), math.nan), where=counts > 0)
    return found


def _values_of(record: StoredRollout) -> dict[str, list[Any] | None]:
    """Return the values of a rollout, computed from its trajectory."""
    turns = record.trajectory.turns
    found: dict[str, list[Any] | None] = {
        "rewards": [number(turn.reward) for turn in turns],
        "invalid": [int(turn.invalid) for turn in turns],
    }
    for name, column in _MEANS.items():
        values = cast("Sequence[float] | None", getattr(record.trajectory if name == "surprisals" else record, column))
        found[name] = None
        if values is not None and len(values):
            sign = -1.0 if name == "surprisals" else 1.0
            means = [mean_of(values[turn.start : turn.stop]) for turn in turns]
            found[name] = [None if one is None else number(sign * one) for one in means]
    return found
