"""Conversion of arrow table rows to stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentsgym.errors import StoreError
from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import (
    FLOATS,
    INTS,
    JSONS,
    METADATA_FLOATS,
    METADATA_INTS,
    METADATA_TEXTS,
    TURN_JSONS,
    Table,
)
from agentsgym.store.values import from_json
from agentsgym.texts import sentence_of, shown
from agentsgym.types import StopReason, Trajectory, Turn

_COPIED = (*INTS, "session_id", "final_reward", "error")


def record_from_row(table: Table, row: int) -> StoredRollout:
    """Read the rollout stored in a table row, with its metadata."""
    corrections = from_json(_value(table, "corrections", row) or "{}")
    metadata = {name: _value(table, name, row) for name in (*METADATA_INTS, *METADATA_TEXTS, "created_at")}
    for name in ("env_config", "tools"):
        text = _value(table, name, row)
        metadata[name] = None if text is None else from_json(text)
    metadata["extra"] = from_json(_value(table, "extra", row))
    metadata |= {name: _numbers(table, name, row) for name in METADATA_FLOATS}
    metadata |= {name: value for name, value in corrections.items() if name in metadata}
    return StoredRollout(
        trajectory=_trajectory(table, row, corrections), inexact=_value(table, "inexact", row) or (), **metadata
    )


def trajectory_from_row(table: Table, row: int) -> Trajectory:
    """Read the trajectory stored in a table row."""
    return _trajectory(table, row, from_json(_value(table, "corrections", row) or "{}"))


def _trajectory(table: Table, row: int, corrections: Mapping[str, Any]) -> Trajectory:
    try:
        values: dict[str, Any] = {name: _value(table, name, row) for name in _COPIED}
        values |= {name: from_json(_value(table, name, row)) for name in JSONS}
        values |= {name: _numbers(table, name, row) for name in ("token_ids", *FLOATS)}
        values["stop_reason"] = StopReason(_value(table, "stop_reason", row))
        values |= {name: value for name, value in corrections.items() if name in values}
        corrected = corrections.get("turns")
        fields = _value(table, "turns", row) if corrected is None else corrected
        if corrected is None:
            for turn in fields:
                turn |= {name: from_json(turn[name]) for name in TURN_JSONS if turn[name] is not None}
        versions = _value(table, "turn_policy_versions", row) or [None] * len(fields)
        turns = [Turn(**turn, policy_version=version) for turn, version in zip(fields, versions, strict=True)]
        values["turns"] = tuple(turns) if isinstance(corrected, tuple) else turns
        return Trajectory(**values)
    except (ValueError, TypeError) as error:
        session = shown(_value(table, "session_id", row))
        raise StoreError(f"the rollout of session {session} is not a valid trajectory: {sentence_of(error)}") from error


def _value(table: Table, name: str, row: int) -> Any:
    return table.column(name)[row].as_py()


def _numbers(table: Table, name: str, row: int) -> list[Any] | None:
    """Return a list of numbers, much faster than with ``as_py``."""
    values: Any = table.column(name)[row].values
    return None if values is None else values.to_numpy(zero_copy_only=False).tolist()
