"""Convert stored rollouts to the columns of an arrow table, and its rows to stored rollouts.

The column ``corrections`` contains, by field, the values that a typed column cannot represent exactly. These take
precedence when a rollout is read.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from agentsgym.errors import StoreError
from agentsgym.fields import has_str_keys, is_list, require
from agentsgym.store.records import StoredRollout, check_numbers, check_trajectory
from agentsgym.store.schema import (
    COMPONENTS,
    FLOATS,
    INTS,
    JSONS,
    METADATA_FLOATS,
    METADATA_INTS,
    METADATA_TEXTS,
    NO_COLUMNS,
    SCHEMA,
    TURN,
    TURN_COLUMNS,
    TURN_FLAGS,
    TURN_INTS,
    TURN_JSONS,
    Table,
    as_plain,
    columns_of,
    from_plain,
    with_components,
)
from agentsgym.store.values import from_json, is_utf8, messages_to_json, to_json
from agentsgym.texts import sentence_of, shown
from agentsgym.types import StopReason, Trajectory, Turn

_COPIED = (*INTS, "session_id", "final_reward", "error")


def record_from_row(table: Table, row: int) -> StoredRollout:
    """Read the rollout stored in a table row, with its metadata.

    Raises:
        StoreError: The row is not a rollout.
    """
    with _naming_the_session(table, row):
        corrections = _corrections(table, row)
        metadata = {name: _value(table, name, row) for name in (*METADATA_INTS, *METADATA_TEXTS, "created_at")}
        metadata |= {name: _json(table, name, row) for name in ("env_config", "tools")}
        metadata["extra"] = _json(table, "extra", row) or {}
        metadata |= {name: _numbers(table, name, row) for name in METADATA_FLOATS}
        metadata |= {name: value for name, value in corrections.items() if name in metadata}
        inexact = _value(table, "inexact", row) or ()
        return StoredRollout(trajectory=_trajectory(table, row, corrections), inexact=inexact, **metadata)


def trajectory_from_row(table: Table, row: int) -> Trajectory:
    """Read the trajectory stored in a table row.

    Raises:
        StoreError: The row is not a rollout.
    """
    with _naming_the_session(table, row):
        trajectory = _trajectory(table, row, _corrections(table, row))
        check_trajectory(trajectory)
        return trajectory


@contextmanager
def _naming_the_session(table: Table, row: int) -> Generator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        session = shown(_value(table, "session_id", row))
        raise StoreError(f"the rollout of session {session} is not a valid trajectory: {sentence_of(error)}") from error


def _trajectory(table: Table, row: int, corrections: Mapping[str, Any]) -> Trajectory:
    values: dict[str, Any] = {name: _value(table, name, row) for name in _COPIED}
    values |= {name: _json(table, name, row) for name in JSONS}
    values |= {name: _numbers(table, name, row) for name in ("token_ids", *FLOATS)}
    values["stop_reason"] = StopReason(_value(table, "stop_reason", row))
    values |= {name: value for name, value in corrections.items() if name in values}
    fields, corrected = _value(table, "turns", row), corrections.get("turns")
    for name, given in (("turns", fields), ("token_ids", values["token_ids"])):
        require(name, given, is_list, "a list")
    if corrected is None:
        for turn in fields:
            turn |= {name: from_json(turn[name]) for name in TURN_JSONS if turn[name] is not None}
    else:
        fields = corrected
    columns = [_value(table, column, row) or [None] * len(fields) for column in TURN_COLUMNS.values()]
    rows = zip(fields, *columns, strict=True)
    turns = [Turn(**turn, **dict(zip(TURN_COLUMNS, others, strict=True))) for turn, *others in rows]
    values["turns"] = tuple(turns) if isinstance(corrected, tuple) else turns
    trajectory = Trajectory(**values)
    if "components" in corrections:
        return from_plain(trajectory, corrections["components"])
    names = _json(table, "component_names", row)
    if names is None:
        return trajectory
    return with_components(trajectory, names, {name: _numbers(table, name, row) for name in COMPONENTS})


def _corrections(table: Table, row: int) -> Mapping[str, Any]:
    corrections = _json(table, "corrections", row) or dict[str, Any]()
    require("corrections", corrections, has_str_keys, "a dict")
    check_numbers(corrections)
    return corrections


def _value(table: Table, name: str, row: int) -> Any:
    return table.column(name)[row].as_py()


def _json(table: Table, name: str, row: int) -> Any:
    text = _value(table, name, row)
    return None if text is None else from_json(text)


def _numbers(table: Table, name: str, row: int) -> list[Any] | None:
    """Return a list of numbers, much faster than with ``as_py``."""
    values: Any = table.column(name)[row].values
    if values is None:
        return None
    if values.null_count:
        raise ValueError(f"{name} must be a list of numbers, but {values.null_count} of them are missing")
    return values.to_numpy(zero_copy_only=False).tolist()


_EXACT: Final = 2**53  # float64 represents every integer up to this
_INT64: Final = range(-(2**63), 2**63)
_CONVERSION_ERRORS: Final = (TypeError, ValueError, OverflowError, struct.error)
_TURN_FIELDS: Final = (*TURN_INTS, *TURN_FLAGS, "reward", "potential", *TURN_JSONS)


def rollouts_to_table(records: Sequence[StoredRollout]) -> pa.Table:
    """Build a table with one row per rollout."""
    columns = _Columns()
    for record in records:
        columns.add(record)
    return columns.to_table()


class _Lists:
    """A column of number lists: a buffer of all numbers, and the end of each list; a list may be missing (None)."""

    def __init__(self, type_code: str, value_type: pa.DataType) -> None:
        self._values = bytearray()
        self._code, self._size, self._type = type_code, struct.calcsize(type_code), value_type
        self._ends, self._missing = array("i", [0]), bytearray()

    def add(self, values: Sequence[Any] | None) -> bool:
        """Add a row, and return whether the column represents it exactly (equal numbers count as exact)."""
        is_exact = True
        if values is not None:
            try:
                packed = struct.pack(f"{len(values)}{self._code}", *values)  # several times faster than array or numpy
            except _CONVERSION_ERRORS:
                is_exact = False
            else:
                self._values += packed
                if self._code == "d" and packed:  # large ints may have been rounded
                    largest = np.abs(np.frombuffer(packed, dtype=np.float64)).max()  # NaN if any value is
                    is_exact = bool(largest < _EXACT) or all(
                        type(value) is not int or float(value) == value for value in values
                    )
        self._missing.append(values is None)
        self._ends.append(len(self._values) // self._size)
        return is_exact

    def to_array(self) -> pa.Array:
        """Build the arrow array of the column."""
        size = len(self._values) // self._size
        values = pa.Array.from_buffers(self._type, size, [None, pa.py_buffer(self._values)])
        return pa.ListArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), len(self._ends), [None, pa.py_buffer(self._ends)]),
            values,
            mask=pa.array(np.frombuffer(self._missing, dtype=np.bool_)) if any(self._missing) else None,
        )


class _Columns:
    """The columns of the rollouts added so far, with one entry per rollout."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {
            field.name: []
            for field in SCHEMA
            if not pa.types.is_nested(field.type) or field.name in {"inexact", *TURN_COLUMNS.values()}
        }
        self._lists = {name: _Lists("d", pa.float64()) for name in (*FLOATS, *METADATA_FLOATS)}
        self._lists["token_ids"] = _Lists("i", pa.int32())
        self._components = {name: _Lists("d", pa.float64()) for name in COMPONENTS}
        self._mask = bytearray()
        self._mask_ends = array("i", [0])
        self._turns: dict[str, list[Any]] = {name: [] for name in _TURN_FIELDS}
        self._turn_ends = array("i", [0])
        self._shared: dict[int, tuple[Any, str]] = {}

    def add(self, record: StoredRollout) -> None:
        """Add one rollout."""
        lost, corrections = [*record.inexact], dict[str, Any]()
        self._add_metadata(record, lost, corrections)
        self._add_outcome(record.trajectory, lost, corrections)
        self._add_tokens(record, lost, corrections)
        self._add_turns(record.trajectory, lost, corrections)
        try:
            columns = columns_of(record.trajectory)
        except ValueError:
            columns = NO_COLUMNS
            corrections["components"] = as_plain(record.trajectory)
        self._values["component_names"].append(columns["component_names"])
        for name, column in self._components.items():
            column.add(columns[name])
        self._values["corrections"].append(to_json(corrections, lost) if corrections else None)
        self._values["inexact"].append([*dict.fromkeys(lost)] or None)  # a rollout from a store already lists its own

    def to_table(self) -> pa.Table:
        """Build the table of all rollouts added."""
        arrays = {name: pa.array(values, type=SCHEMA.field(name).type) for name, values in self._values.items()} | {
            name: column.to_array() for name, column in (self._lists | self._components).items()
        }
        mask = pa.array(np.frombuffer(self._mask, dtype=np.bool_))
        arrays["agent_token_mask"] = pa.ListArray.from_arrays(pa.array(self._mask_ends, pa.int32()), mask)
        fields = [pa.array(self._turns[field.name], type=field.type) for field in TURN]
        turns = pa.StructArray.from_arrays(fields, fields=[*TURN])
        arrays["turns"] = pa.ListArray.from_arrays(pa.array(self._turn_ends, pa.int32()), turns)
        return pa.table([arrays[name] for name in SCHEMA.names], schema=SCHEMA)

    def _add_metadata(self, record: StoredRollout, lost: list[str], corrections: dict[str, Any]) -> None:
        for name in (*METADATA_INTS, "created_at"):
            self._values[name].append(getattr(record, name))
        for name in METADATA_TEXTS:
            self._values[name].append(_text(record, name, corrections))
        for name in ("env_config", "tools"):
            # Most rollouts of a part share these objects, so each is serialized once. Functions in them are not stored,
            # but also not reported as losses.
            value = getattr(record, name)
            known = self._shared.get(id(value))
            if known is None and value is not None:
                plain = [*value] if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType]
                known = self._shared[id(value)] = (value, to_json(plain))  # referring to the value keeps its id unique  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            self._values[name].append(None if known is None else known[1])
        self._values["extra"].append(to_json(record.extra, lost))

    def _add_outcome(self, trajectory: Trajectory, lost: list[str], corrections: dict[str, Any]) -> None:
        values, seed = self._values, trajectory.seed
        for name in INTS:
            value = getattr(trajectory, name)
            is_exact = type(value) is int and value in _INT64
            values[name].append(value if is_exact else None)
            if not is_exact:
                corrections[name] = value
        for name in ("session_id", "error"):
            values[name].append(_text(trajectory, name, corrections))
        values["seed"].append(seed if type(seed) is int and seed in _INT64 else None)
        values["final_reward"].append(_nearest(trajectory.final_reward))
        if not _is_float(trajectory.final_reward):
            corrections["final_reward"] = trajectory.final_reward
        values["stop_reason"].append(StopReason(trajectory.stop_reason).value)
        try:
            success = trajectory.success
        except Exception:  # noqa: BLE001  # the environment's info may contain objects that raise
            success = None
        values["success"].append(success)
        values["num_turns"].append(len(trajectory.turns))
        values["num_tokens"].append(len(trajectory.token_ids))
        for name in JSONS:
            write, losses = messages_to_json if name == "messages" else to_json, list[str]()
            values[name].append(write(getattr(trajectory, name), losses))
            lost += [f"{name}: {loss}" for loss in losses]

    def _add_tokens(self, record: StoredRollout, lost: list[str], corrections: dict[str, Any]) -> None:
        for name, column in self._lists.items():
            values = getattr(record if name in METADATA_FLOATS else record.trajectory, name)
            kind = type(values)  # pyright: ignore[reportUnknownVariableType]
            is_exact = column.add(values)
            if kind in {tuple, np.ndarray} or not is_exact:
                corrections[name] = values
            elif values is not None and kind is not list:
                lost.append(f"{name}: {kind.__qualname__} stored as list")
        mask = bytearray(len(record.trajectory.token_ids))
        num_agent_tokens = 0
        for turn in record.trajectory.turns:
            num_agent_tokens += (length := turn.stop - turn.start)
            mask[turn.start : turn.stop] = b"\1" * length
        self._mask += mask
        self._mask_ends.append(len(self._mask))
        self._values["num_agent_tokens"].append(num_agent_tokens)

    def _add_turns(self, trajectory: Trajectory, lost: list[str], corrections: dict[str, Any]) -> None:
        turns = trajectory.turns
        is_exact = all(map(_is_exact, turns))
        stored = turns if is_exact else [_nearest_turn(turn) for turn in turns]
        for name in (*TURN_INTS, *TURN_FLAGS, "reward", "potential"):
            self._turns[name] += [getattr(turn, name) for turn in stored]
        for name in TURN_JSONS:
            values = [getattr(turn, name) for turn in stored]
            self._turns[name] += [None if value is None else to_json(value, lost) for value in values]
        self._turn_ends.append(len(self._turns["start"]))
        for name, column in TURN_COLUMNS.items():
            values = [getattr(turn, name) for turn in turns]
            self._values[column].append(values if any(value is not None for value in values) else None)
        if not is_exact or type(turns) is not list:
            plain = [{name: getattr(turn, name) for name in _TURN_FIELDS} for turn in turns]
            corrections["turns"] = tuple(plain) if type(turns) is tuple else plain


def _is_exact(turn: Turn) -> bool:
    """Whether the columns represent a turn exactly."""
    return (
        type(turn.start) is type(turn.stop) is type(turn.episode) is int
        and type(turn.message_index) is type(turn.prompt_start) is int
        and turn.episode in _INT64
        and turn.message_index in _INT64
        and type(turn.invalid) is type(turn.exact) is bool
        and _is_float(turn.reward)
        and (turn.potential is None or _is_float(turn.potential))
    )


def _nearest_turn(turn: Turn) -> Turn:
    """Approximate a turn that the columns cannot represent exactly, for filters and other tools."""
    numbers = {name: int(getattr(turn, name)) for name in TURN_INTS}
    return replace(
        turn,
        **{name: value if value in _INT64 else 0 for name, value in numbers.items()},
        **{name: bool(getattr(turn, name)) for name in TURN_FLAGS},
        reward=_nearest(turn.reward),
        potential=_nearest(turn.potential),
    )


def _is_float(value: Any) -> bool:
    """Whether a float64 represents the number exactly."""
    return type(value) is float or (type(value) is int and -_EXACT < value < _EXACT)


def _nearest(value: Any) -> float | None:
    """Return the float64 closest to a number, for filters and other tools; None if there is none."""
    try:
        return float(value)
    except _CONVERSION_ERRORS:
        return None


def _text(owner: Any, name: str, corrections: dict[str, Any]) -> str | None:
    value = getattr(owner, name)
    if value is None or (type(value) is str and is_utf8(value)):
        return value
    corrections[name] = value
    return str(value).encode("utf-8", "backslashreplace").decode()
