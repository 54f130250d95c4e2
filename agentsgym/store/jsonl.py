"""Conversion of stored rollouts to lines of JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from agentsgym.errors import StoreError
from agentsgym.store.records import StoredRollout, check_numbers
from agentsgym.store.values import from_json, to_json
from agentsgym.types import StopReason, Trajectory, Turn


def record_to_line(record: StoredRollout) -> str:
    """Serialize a rollout as a line of JSON: its fields by name, its trajectory and turns as nested objects."""
    plain = _fields(record)
    plain["created_at"] = record.created_at.isoformat()
    plain["trajectory"] = trajectory = _fields(record.trajectory)
    trajectory["stop_reason"] = StopReason(record.trajectory.stop_reason).value
    turns = record.trajectory.turns
    trajectory["turns"] = (tuple if isinstance(turns, tuple) else list)(map(_fields, turns))
    not_exact: list[str] = []  # descriptions of the values that JSON cannot represent exactly
    line = to_json(plain, not_exact)
    if new := [one for one in not_exact if not any(one in known for known in record.inexact)]:
        line = to_json(plain | {"inexact": [*record.inexact, *new]})
    return line


def record_from_line(line: str) -> StoredRollout:
    """Parse a line written by :func:`record_to_line`."""
    plain = from_json(line)
    if not isinstance(plain, Mapping) or "trajectory" not in plain:
        raise StoreError("each line must be a JSON object with the key 'trajectory'")
    values: dict[str, Any] = {**plain}
    trajectory: dict[str, Any] = {**values["trajectory"]}
    check_numbers(trajectory)
    check_numbers(values)
    turns = trajectory["turns"]
    trajectory["turns"] = (tuple if isinstance(turns, tuple) else list)(Turn(**turn) for turn in turns)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    trajectory["stop_reason"] = StopReason(trajectory["stop_reason"])
    values["trajectory"] = Trajectory(**trajectory)
    values["created_at"] = datetime.fromisoformat(values["created_at"])
    return StoredRollout(**values)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
