"""Conversion of arrow table rows to stored rollouts."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from agentsgym.errors import StoreError
from agentsgym.fields import has_str_keys, is_list, require
from agentsgym.store.named import from_plain, with_components
from agentsgym.store.records import StoredRollout, check_numbers, check_trajectory
from agentsgym.store.schema import (
    COMPONENTS,
    FLOATS,
    INTS,
    JSONS,
    METADATA_FLOATS,
    METADATA_INTS,
    METADATA_TEXTS,
    TURN_COLUMNS,
    TURN_JSONS,
    Table,
)
from agentsgym.store.values import from_json
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
    return _with_components(Trajectory(**values), table, row, corrections)


def _with_components(trajectory: Trajectory, table: Table, row: int, corrections: Mapping[str, Any]) -> Trajectory:
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
