"""Responses to the page's requests for data, whether they are served or written into the page."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np

from agentsgym.envs.datasets.naming import name_of_env
from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, require
from agentsgym.statistics.breakdown import seat_outcomes
from agentsgym.store.columns import record_from_row
from agentsgym.store.values import from_json
from agentsgym.types import StopReason, Trajectory, Turn
from agentsgym.viewer.index import Index
from agentsgym.viewer.plain import mean_of, number, text_of
from agentsgym.viewer.rollouts import TokenTexts, group_data, rollout_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentsgym.store.reader import RolloutStore
    from agentsgym.store.records import StoredRollout

Mode = Literal["served", "written"]

_SEARCH_S: Final = 10.0  # a longer search stops, and is reported as incomplete
_PER_SEARCH: Final = 1024  # rollouts read at a time
_BLOCK: Final = 128  # rollouts read together, as many as in a row group of a part
_MAX_CACHED_BYTES: Final = 256 << 20  # of blocks
_PER_READ: Final = 1024  # rollouts whose tokens are in memory at the same time
_MEANS: Final = {"advantages": "advantages", "surprisals": "logprobs", "entropies": "entropies"}
_OUTCOME: Final = ("stop_reason", "success", "final_reward", "final_rewards")


class Answers:
    """The responses to the page's requests; thread-safe.

    Attributes:
        index: The listed rollouts.
        store: The rollouts, including those beyond the limit.
    """

    def __init__(self, store: RolloutStore, *, limit: int, mode: Mode, tokenizer: Path | None = None) -> None:
        """Read the columns of the list.

        Args:
            store: The rollouts: a store, or a slice or filter of one.
            limit: The maximum number of rollouts listed; the newest are chosen.
            mode: Whether the page requests its data (``"served"``) or contains all of it (``"written"``).
            tokenizer: A ``tokenizer.json``, or its folder, for all rollouts; None for the tokenizers in the store.

        Raises:
            ConfigError: ``limit`` is not positive.
            StoreError: A file is missing or damaged, or ``tokenizer`` is not a tokenizer.
        """
        require("limit", limit, is_int(1), "a positive int")
        self.store = store
        self._mode: Mode = mode
        self._texts = TokenTexts(store.path, tokenizer)
        self.index = Index(store, limit)
        self._unfiltered = store.unfiltered
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Any] = OrderedDict()

    @property
    def title(self) -> str:
        """The name of the store."""
        return self.store.path.resolve().name or str(self.store.path)

    def list(self) -> dict[str, Any]:
        """Return the list of rollouts by column."""
        shown, total, notes = len(self.index.rows), self.index.total, list[str]()
        if shown < total:
            notes.append(f"only the newest {shown:,} of {total:,} rollouts; a larger --limit shows more")
        if (everything := len(self._unfiltered)) > total:
            notes.append(f"selected from the {everything:,} rollouts of the store")
        if skipped := len(self.store.skipped):
            notes.append(f"{skipped} files of the store cannot be read and were skipped")
        return {
            "title": self.title,
            # A written page may be shared with others.
            "path": str(self.store.path) if self._mode == "served" else None,
            "total": total,
            "shown": shown,
            "mode": self._mode,
            "note": "; ".join(notes) or None,
            "columns": self.index.columns,
            "words": self.index.words,
        }

    def rollout(self, row: int) -> dict[str, Any]:
        """Return a rollout: its conversation, turns and tokens.

        Raises:
            ConfigError: The list does not contain the rollout.
            StoreError: The rollout's file is missing or damaged.
        """
        if row not in self.index:
            raise ConfigError(f"rollout {row} is not among the rollouts shown")
        return rollout_data(row, self._record(row), self._texts.texts)

    def group(self, key: int) -> dict[str, Any]:
        """Return the rollouts of a task group, for display side by side.

        Raises:
            ConfigError: The list does not contain the group.
            StoreError: A file is missing or damaged.
        """
        if key not in self.index.groups:
            raise ConfigError(f"task group {key} is not among the rollouts shown")
        rows = self.index.groups[key]
        records = [self._record(row) for row in rows]
        first = records[0]
        environment = name_of_env(first.env_class_path, first.env_config or {}) or "unknown environment"
        generation = "" if first.generation is None else f"generation {first.generation}, "
        task = f"task {first.trajectory.task_index}" if first.group is None else f"task group {first.group}"
        return group_data(key, f"{environment}: {generation}{task}", rows, records)

    def turns(self) -> dict[str, Any]:
        """Return reward, advantage, surprisal and entropy of every turn of every rollout.

        Raises:
            StoreError: A file is missing or damaged.
        """
        return turn_summaries(self.store[max(0, self.index.total - len(self.index.rows)) :])

    def search(self, text: str) -> dict[str, Any]:
        """Find the rollouts whose messages contain a text, ignoring case.

        Raises:
            StoreError: A file is missing or damaged.
        """
        wanted = text.lower()
        raw = json.dumps(text, ensure_ascii=False)[1:-1].lower()  # the text as written in the JSON column
        rows: list[int] = []
        deadline = time.monotonic() + _SEARCH_S
        end = self.index.total
        begin = end - len(self.index.rows)
        while end > begin and wanted:
            if time.monotonic() > deadline:
                return {"rows": rows, "complete": False}
            part = self.store[max(begin, end - _PER_SEARCH) : end]
            column = part.table(["messages"]).column("messages").to_pylist()
            for row, messages in zip(part.rows, column, strict=True):
                lowered = (messages or "").lower()
                # Messages are parsed only if they may contain the text.
                is_candidate = raw in lowered or '"$str"' in lowered
                if is_candidate and any(wanted in one.lower() for one in _texts_of(from_json(messages))):
                    rows.append(row)
            end -= len(part)
        return {"rows": sorted(rows), "complete": True}

    def _record(self, row: int) -> StoredRollout:
        """Read a rollout of the folder, together with its neighbors; the last blocks are cached."""
        index = row // _BLOCK
        with self._lock:
            block = self._blocks.get(index)
            if block is None:
                block = self._unfiltered[index * _BLOCK : (index + 1) * _BLOCK].table().combine_chunks()
                self._blocks[index] = block
                while len(self._blocks) > 1 and sum(one.nbytes for one in self._blocks.values()) > _MAX_CACHED_BYTES:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(index)
        return record_from_row(block, row % _BLOCK)


def _texts_of(value: Any) -> list[str]:
    """Return all texts of a conversation except roles, types and ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return [text for name, one in items if name not in {"role", "type", "id"} for text in _texts_of(one)]
    if not isinstance(value, list | tuple):
        return []
    return [text for one in cast("Sequence[Any]", value) for text in _texts_of(one)]


def turn_summaries(store: RolloutStore) -> dict[str, Any]:
    """Return each turn's reward, validity, and means over its tokens, (N, K), and who won each rollout, (N,).

    Raises:
        StoreError: A file is missing or damaged.
    """
    found: dict[str, list[Any]] = {
        name: [] for name in ("row", "rewards", "advantages", "surprisals", "entropies", "invalid", "won")
    }
    found["row"] += store.rows
    for begin in range(0, len(store), _PER_READ):
        part = store[begin : begin + _PER_READ]
        table: Any = part.table(["turns", "corrections", *_OUTCOME, *_MEANS.values()]).combine_chunks()
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
    roles = turns.nested(turns.flat.field("role").to_pylist())
    outcomes = zip(roles, *(table.column(name).to_pylist() for name in _OUTCOME), strict=True)
    found["won"] = [_won(_played(*one)) if any(one[0]) else {} for one in outcomes]
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


def _played(
    roles: Sequence[str | None], stop_reason: str, success: bool | None, reward: float, rewards: str
) -> Trajectory:
    """Return a rollout with only its roles and its outcome, from the values of their columns."""
    turns = [Turn(start=0, stop=0, reward=0.0, role=from_json(role)) for role in roles if role is not None]
    return Trajectory(
        token_ids=[],
        turns=turns,
        messages=[],
        final_reward=reward,
        final_rewards=from_json(rewards),
        stop_reason=StopReason(stop_reason),
        info={"success": success},
    )


def _won(trajectory: Trajectory) -> dict[str, bool | None]:
    """Return whether each role won, None if unknown; empty for a rollout that failed or has no roles."""
    return {} if trajectory.failed else {text_of(seat.role): seat.success for seat in seat_outcomes(trajectory)}


def _values_of(record: StoredRollout) -> dict[str, Any]:
    """Return the values of a rollout, computed from its trajectory."""
    turns = record.trajectory.turns
    found: dict[str, Any] = {
        "won": _won(record.trajectory),
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
