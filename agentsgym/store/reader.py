"""Lazy reading of a rollout store: by row, slice or filter, and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast, overload

import numpy as np
import pyarrow as pa

from agentsgym._lazy import deferred
from agentsgym.errors import ConfigError, StoreError, did_you_mean
from agentsgym.store.columns import record_from_row, trajectory_from_row
from agentsgym.store.parts import Part, read_row_group, scan, warn_of_unfinished
from agentsgym.store.records import StoredRollout, record_from_line, record_to_line
from agentsgym.store.runs import check_one_run
from agentsgym.store.schema import JSONS, SCALARS, SCHEMA, Expression, Table
from agentsgym.store.values import from_json
from agentsgym.store.writer import RolloutWriter
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from pandas import DataFrame

    from agentsgym.types import Trajectory

_NUMBERED: Final = ("generation", "group")  # which every run counts anew
_INDEX: Final = "__index__"
_JSON_COLUMNS: Final = (*JSONS, "env_config", "tools", "extra")
_html_of = deferred("agentsgym.reports.html", "rollouts_html")


class RolloutStore(Sequence["Trajectory"]):
    """The rollouts of a folder at the time of opening, in the order in which their parts were written.

    Opening a store reads only the names of its files. ``store[i]`` reads the row group (up to 128 rollouts) that
    contains the rollout. The last row group is cached, so iterating over a store reads everything once. Slices and
    filtered stores are stores, too, and just as lazy.

    Attributes:
        path: The folder.
        skipped: The parquet files in the folder that cannot be read, each with the reason, which is also logged.
    """

    writer = RolloutWriter

    def __init__(self, path: str | Path) -> None:
        """Open a store.

        Args:
            path: The folder.

        Raises:
            StoreError: The folder does not exist.
        """
        self.path = Path(path)
        parts, skipped = scan(self.path)
        warn_of_unfinished(self.path)
        self.skipped: Mapping[Path, str] = skipped
        self._files = _Files(parts)
        self._rows: NDArray[np.int64] | range = range(self._files.num_rows)

    @property
    def rows(self) -> Sequence[int]:
        """The index of each rollout of this store among all rollouts of the folder."""
        return self._rows if isinstance(self._rows, range) else self._rows.tolist()

    @property
    def unfiltered(self) -> RolloutStore:
        """A store of all rollouts that the folder had at the time of opening, without any slice or filter."""
        return self._view(range(self._files.num_rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"RolloutStore({str(self.path)!r}, {len(self)} rollouts)"

    def _repr_html_(self) -> str:
        return _html_of(self)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> RolloutStore: ...
    def __getitem__(self, index: int | slice) -> Trajectory | RolloutStore:
        """Read one rollout, or return a store with the rollouts of a slice."""
        if isinstance(index, slice):
            return self._view(self._rows[index])
        return trajectory_from_row(*self._files.locate(self._row(index)))

    def __iter__(self) -> Iterator[Trajectory]:
        for row in self._rows:
            yield trajectory_from_row(*self._files.locate(int(row)))

    def record(self, index: int) -> StoredRollout:
        """Read one rollout with all its metadata.

        Raises:
            StoreError: The file is missing or damaged.
        """
        return record_from_row(*self._files.locate(self._row(index)))

    def records(self) -> Iterator[StoredRollout]:
        """Iterate over all rollouts with all their metadata."""
        for row in self._rows:
            yield record_from_row(*self._files.locate(int(row)))

    def filter(self, expression: Expression | None = None, /, **columns: Any) -> RolloutStore:
        """Return a store with the rollouts that match; only the necessary columns are read.

        Args:
            expression: An expression over columns that are not lists, such as
                ``pyarrow.compute.field("final_reward") > 0``.
            **columns: For each column, the value to match (None matches unknown values) or a predicate; the values of
                JSON columns are parsed first, so ``task_data`` is a dict.

        Raises:
            ConfigError: A column is unknown, the expression cannot be evaluated, or rollouts with a ``generation`` or
                ``group`` are of several runs and ``run`` is not given.
        """
        if isinstance(expression, str):
            raise ConfigError(
                f"filter requires keywords or an expression, as in filter(success=True), got {expression!r}"
            )
        names = [*SCALARS] if expression is not None else []
        table = self.table([*names, *(name for name in columns if name not in names)])
        kept: NDArray[np.bool_] = np.ones(len(self), dtype=np.bool_)
        for name, wanted in columns.items():
            _check_wanted(name, wanted, table.schema.field(name).type)
            values = cast("list[Any]", table.column(name).to_pylist())
            if name in _JSON_COLUMNS:
                values = [None if value is None else from_json(value) for value in values]
            passes = [bool(wanted(value) if callable(wanted) else value == wanted) for value in values]
            kept &= np.array(passes, dtype=np.bool_)
        if expression is not None:
            try:
                passed = table.append_column(_INDEX, pa.array(np.arange(len(self)))).filter(expression)
            except (pa.ArrowException, TypeError) as error:
                why = sentence_of(error).splitlines()[0]  # arrow appends the entire schema
                raise ConfigError(f"the filter expression cannot be evaluated: {why}") from error
            kept &= np.isin(np.arange(len(self)), passed.column(_INDEX).to_numpy())
        found = self._view(np.asarray(self._rows, dtype=np.int64)[kept])
        numbered = [f"{name}={columns[name]}" for name in _NUMBERED if isinstance(columns.get(name), int)]
        if numbered and expression is None and "run" not in columns:
            check_one_run(found.table(["run"]), f"rollouts with {numbered[0]} are")
        return found

    def table(self, columns: Sequence[str] | None = None) -> Table:
        """Read columns, all by default, as a ``pyarrow.Table`` with one row per rollout.

        Raises:
            ConfigError: A column is unknown.
            StoreError: A file is missing or damaged.
        """
        for name in columns or ():
            if name not in SCHEMA.names:
                raise ConfigError(f"a rollout store has no column {name!r}{did_you_mean(name, SCHEMA.names)}")
        return self._files.table(self._rows, columns)

    def to_pandas(self, columns: Sequence[str] | None = None) -> DataFrame:
        """Read columns as a ``pandas.DataFrame``; by default all that have one value per rollout."""
        return self.table(SCALARS if columns is None else columns).to_pandas()

    def as_dict(self) -> dict[str, Any]:
        """Return all rollouts with their metadata, in memory, as plain JSON values.

        The keys are ``path``, ``num_rollouts``, ``skipped`` (reasons by file) and ``rollouts``, each as returned by
        :meth:`~agentsgym.store.records.StoredRollout.as_dict`. For a large store, use a slice or a filter, such as
        ``store[:100].as_dict()``, or :meth:`to_jsonl`, which writes one rollout at a time.
        """
        return {
            "path": str(self.path),
            "num_rollouts": len(self),
            "skipped": {str(path): why for path, why in self.skipped.items()},
            "rollouts": [record.as_dict() for record in self.records()],
        }

    def to_datasets(self, columns: Sequence[str] | None = None) -> Dataset:
        """Read columns, all by default, as a ``datasets.Dataset``, in memory."""
        from datasets import Dataset  # noqa: PLC0415  # slow to import
        from datasets.table import InMemoryTable  # noqa: PLC0415

        return Dataset(InMemoryTable(self.table(columns).replace_schema_metadata()))

    def to_jsonl(self, path: str | Path) -> Path:
        """Write the rollouts as JSON lines, which :meth:`from_jsonl` restores exactly; an existing file is replaced."""
        path = Path(path)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{record_to_line(record)}\n" for record in self.records())
        return path

    @classmethod
    def from_jsonl(cls, source: str | Path, path: str | Path) -> Self:
        """Add the rollouts of a file written by :meth:`to_jsonl` to a store, and open the store.

        Args:
            source: The file; empty lines are skipped.
            path: The folder of the store, which is created if it does not exist.

        Raises:
            StoreError: A line is not a rollout; the rollouts before it have been added to the store.
        """
        with RolloutWriter(path) as writer, Path(source).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                        writer.add_record(record_from_line(text))
                except (StoreError, ConfigError, TypeError, ValueError, KeyError, json.JSONDecodeError) as error:
                    raise StoreError(f"{source}, line {number} is not a stored rollout: {shown(str(error))}") from error
        return cls(path)

    def _row(self, index: int) -> int:
        if isinstance(index, str):
            raise TypeError(f"a store is read by row, got {index!r}: for a column, write store.table([{index!r}])")
        try:
            return int(self._rows[index])
        except IndexError as error:
            raise IndexError(f"{self!r} has no rollout {index}") from error

    def _view(self, rows: NDArray[np.int64] | range) -> RolloutStore:
        view = object.__new__(RolloutStore)
        view.path, view.skipped, view._files, view._rows = self.path, self.skipped, self._files, rows
        return view


def _check_wanted(name: str, wanted: Any, kind: pa.DataType) -> None:
    """Reject a value that no rollout has in a column of this type."""
    for what, types, fits in (("text", str, pa.types.is_string), ("lists", (list, tuple, set), pa.types.is_nested)):
        if isinstance(wanted, types) and not fits(kind) and name not in _JSON_COLUMNS:
            given = shown(cast("object", wanted))
            how = "pass a value of the column, or a function of it, such as lambda value: value in …"
            raise ConfigError(f"the column {name!r} has no {what}, so it cannot be {given}: {how}")


class _Files:
    """The files of an open store, read one row group at a time."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._groups = [(part, index) for part in parts for index in range(len(part.row_groups))]
        sizes = [size for part in parts for size in part.row_groups]
        self.num_rows = sum(sizes)
        self._starts = np.cumsum([0, *sizes], dtype=np.int64)  # of each row group, and the end of the last
        self._last: tuple[int, Table] | None = None

    def locate(self, row: int) -> tuple[Table, int]:
        """Return the row group that contains a row, and the row's index in it."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        last = self._last  # read once: another thread may replace it
        if last is None or last[0] != group:
            last = self._last = (group, read_row_group(*self._groups[group]))
        return last[1], row - int(self._starts[group])

    def table(self, rows: NDArray[np.int64] | range, columns: Sequence[str] | None) -> Table:
        """Read columns (None: all) of rows, in the order of ``rows``."""
        wanted = np.asarray(rows, dtype=np.int64)
        names = SCHEMA.names if columns is None else [*columns]
        pieces = [SCHEMA.empty_table().select(names)]
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        for positions in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(groups)) + 1) if len(wanted) else ():
            group = int(groups[positions[0]])
            part, index = self._groups[group]
            table = read_row_group(part, index, names)
            inside = wanted[positions] - self._starts[group]
            is_complete = len(inside) == len(table) and bool((np.diff(inside) == 1).all())
            pieces.append(table if is_complete else table.take(pa.array(inside)))
        return pa.concat_tables([piece.replace_schema_metadata(SCHEMA.metadata) for piece in pieces])
