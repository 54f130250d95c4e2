"""Conversion of arrow table rows to stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

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
_KINDS: Final[Mapping[str, type[Any]]] = {
    **dict.fromkeys(("info", "task_data", "final_rewards"), Mapping),
    **dict.fromkeys(("messages", "token_ids"), Sequence),
    **dict.fromkeys(INTS, int),
    "session_id": str,
    "final_reward": float,
}


def record_from_row(table: Table, row: int) -> StoredRollout:
    """Read the rollout stored in a table row, with its metadata."""
    corrections = _corrections(table, row)
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
    return _trajectory(table, row, _corrections(table, row))


def _corrections(table: Table, row: int) -> Mapping[str, Any]:
    """Return the values that the columns cannot represent, by field."""
    corrections = from_json(_value(table, "corrections", row) or "{}")
    if not isinstance(corrections, dict):
        raise StoreError(f"the column 'corrections' must contain JSON objects, got {shown(corrections)}")
    return cast("dict[str, Any]", corrections)


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
        return checked_trajectory(values)
    except (ValueError, TypeError) as error:
        session = shown(_value(table, "session_id", row))
        raise StoreError(f"the rollout of session {session} is not a valid trajectory: {sentence_of(error)}") from error


def checked_trajectory(values: Mapping[str, Any]) -> Trajectory:
    """Build a trajectory from values that somebody else may have written.

    Raises:
        TypeError: A value is of the wrong kind.
        ValueError: The values contradict each other.
    """
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name), kind):
            raise TypeError(f"its {name} must be a {kind.__name__.lower()}, got {shown(values.get(name))}")
    if not all(isinstance(one, Mapping) and "role" in one for one in values["messages"]):
        raise TypeError(f"its messages must be a list of dicts with a role, got {shown(values['messages'])}")
    return Trajectory(**values)


def _value(table: Table, name: str, row: int) -> Any:
    return table.column(name)[row].as_py()


def _numbers(table: Table, name: str, row: int) -> list[Any] | None:
    """Return a list of numbers, much faster than with ``as_py``."""
    values: Any = table.column(name)[row].values
    return None if values is None else values.to_numpy(zero_copy_only=False).tolist()
