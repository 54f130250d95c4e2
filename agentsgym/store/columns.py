"""Lay stored rollouts out as the columns of an arrow table.

Any value that a typed column cannot hold exactly is also in ``corrections``, by field, which takes precedence on
reading.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import (
    FLOATS,
    INTS,
    JSONS,
    OWN_FLOATS,
    OWN_INTS,
    OWN_TEXTS,
    SCHEMA,
    TURN,
    TURN_FLAGS,
    TURN_INTS,
    TURN_JSONS,
)
from agentsgym.store.values import is_utf8, messages_to_json, to_json
from agentsgym.types import StopReason, Trajectory, Turn

_EXACT: Final = 2**53  # every integer up to it is a float64
_INT64: Final = range(-(2**63), 2**63)
_REFUSED: Final = (TypeError, ValueError, OverflowError, struct.error)  # raised for values outside a number type
_TURN_FIELDS: Final = (*TURN_INTS, *TURN_FLAGS, "reward", "potential", *TURN_JSONS)


def table_of(records: Sequence[StoredRollout]) -> pa.Table:
    """Make a table with one row per rollout."""
    columns = _Columns()
    for record in records:
        columns.add(record)
    return columns.table()


class _Lists:
    """A column of lists of numbers: one buffer with all of them, and the end of each list; None is a missing list."""

    def __init__(self, type_code: str, value_type: pa.DataType) -> None:
        self._values = bytearray()
        self._code, self._size, self._type = type_code, struct.calcsize(type_code), value_type
        self._ends, self._missing = array("i", [0]), bytearray()

    def add(self, given: Sequence[Any] | None) -> bool:
        """Add a row; returns whether it is held exactly, equal numbers counting as exact."""
        is_exact = True
        if given is not None:
            try:
                packed = struct.pack(f"{len(given)}{self._code}", *given)  # several times faster than array or numpy
            except _REFUSED:
                is_exact = False
            else:
                self._values += packed
                if self._code == "d" and packed:  # floats may differ from large ints
                    largest = np.abs(np.frombuffer(packed, dtype=np.float64)).max()  # NaN if one is
                    is_exact = bool(largest < _EXACT) or all(type(one) is not int or float(one) == one for one in given)
        self._missing.append(given is None)
        self._ends.append(len(self._values) // self._size)
        return is_exact

    def array(self) -> pa.Array:
        """The column."""
        size = len(self._values) // self._size
        values = pa.Array.from_buffers(self._type, size, [None, pa.py_buffer(self._values)])
        return pa.ListArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), len(self._ends), [None, pa.py_buffer(self._ends)]),
            values,
            mask=pa.array(np.frombuffer(self._missing, dtype=np.bool_)) if any(self._missing) else None,
        )


class _Columns:
    """The columns of some rollouts, one entry per rollout."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {
            one.name: []
            for one in SCHEMA
            if not pa.types.is_nested(one.type) or one.name in {"inexact", "turn_policy_versions"}
        }
        self._lists = {name: _Lists("d", pa.float64()) for name in (*FLOATS, *OWN_FLOATS)}
        self._lists["token_ids"] = _Lists("i", pa.int32())
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
        self._values["corrections"].append(to_json(corrections, lost) if corrections else None)
        self._values["inexact"].append([*dict.fromkeys(lost)] or None)  # a rollout from a store has its losses already

    def table(self) -> pa.Table:
        """The table of all rollouts added."""
        arrays = {name: pa.array(values, type=SCHEMA.field(name).type) for name, values in self._values.items()} | {
            name: column.array() for name, column in self._lists.items()
        }
        mask = pa.array(np.frombuffer(self._mask, dtype=np.bool_))
        arrays["agent_token_mask"] = pa.ListArray.from_arrays(pa.array(self._mask_ends, pa.int32()), mask)
        fields = [pa.array(self._turns[field.name], type=field.type) for field in TURN]
        turns = pa.StructArray.from_arrays(fields, fields=[*TURN])
        arrays["turns"] = pa.ListArray.from_arrays(pa.array(self._turn_ends, pa.int32()), turns)
        return pa.table([arrays[name] for name in SCHEMA.names], schema=SCHEMA)

    def _add_metadata(self, record: StoredRollout, lost: list[str], corrections: dict[str, Any]) -> None:
        for name in (*OWN_INTS, "created_at"):
            self._values[name].append(getattr(record, name))
        for name in OWN_TEXTS:
            self._values[name].append(_text(record, name, corrections))
        for name in ("env_config", "tools"):
            # Most rollouts of a part share these objects: each is written once. Functions in them count as no loss.
            value = getattr(record, name)
            known = self._shared.get(id(value))
            if known is None and value is not None:
                plain = [*value] if isinstance(value, tuple) else value
                known = self._shared[id(value)] = (value, to_json(plain))  # the value is held, so its id stays unique
            self._values[name].append(None if known is None else known[1])
        self._values["extra"].append(to_json(record.extra, lost))

    def _add_outcome(self, trajectory: Trajectory, lost: list[str], corrections: dict[str, Any]) -> None:
        values, seed = self._values, trajectory.seed
        for name in INTS:
            value = getattr(trajectory, name)
            is_held = type(value) is int and value in _INT64
            values[name].append(value if is_held else None)
            if not is_held:
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
        except Exception:  # noqa: BLE001  # foreign: what an environment put into its info
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
            given = getattr(record if name in OWN_FLOATS else record.trajectory, name)
            kind = type(given)
            is_held = column.add(given)
            if kind in {tuple, np.ndarray} or not is_held:
                corrections[name] = given
            elif given is not None and kind is not list:
                lost.append(f"{name}: given as {kind.__qualname__}, kept as list")
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
        is_held = all(map(_is_usual, turns))
        columns = turns if is_held else [_nearest_turn(turn) for turn in turns]
        for name in (*TURN_INTS, *TURN_FLAGS, "reward", "potential"):
            self._turns[name] += [getattr(turn, name) for turn in columns]
        for name in TURN_JSONS:
            given = [getattr(turn, name) for turn in columns]
            self._turns[name] += [None if one is None else to_json(one, lost) for one in given]
        self._turn_ends.append(len(self._turns["start"]))
        versions = [turn.policy_version for turn in turns]
        is_known = any(version is not None for version in versions)
        self._values["turn_policy_versions"].append(versions if is_known else None)
        if not is_held or type(turns) is not list:
            plain = [{name: getattr(turn, name) for name in _TURN_FIELDS} for turn in turns]
            corrections["turns"] = tuple(plain) if type(turns) is tuple else plain


def _is_usual(turn: Turn) -> bool:
    """Whether the columns hold a turn exactly."""
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
    """Approximate a turn that the columns cannot hold, for other tools."""
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
    """The closest float64 to a number, for filters and other tools."""
    try:
        return float(value)
    except _REFUSED:
        return None


def _text(owner: Any, name: str, corrections: dict[str, Any]) -> str | None:
    value = getattr(owner, name)
    if value is None or (type(value) is str and is_utf8(value)):
        return value
    corrections[name] = value
    return str(value).encode("utf-8", "backslashreplace").decode()
