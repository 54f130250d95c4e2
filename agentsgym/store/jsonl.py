"""One line of JSON per rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from agentsgym.errors import StoreError
from agentsgym.store.records import StoredRollout
from agentsgym.store.values import from_json, to_json
from agentsgym.types import StopReason, Trajectory, Turn


def line_of(record: StoredRollout) -> str:
    """Serialize a rollout as one line: its fields by name, with the trajectory's and the turns' nested in them."""
    plain = _fields(record)
    plain["created_at"] = record.created_at.isoformat()
    plain["trajectory"] = trajectory = _fields(record.trajectory)
    trajectory["stop_reason"] = StopReason(record.trajectory.stop_reason).value
    turns = record.trajectory.turns
    trajectory["turns"] = (tuple if isinstance(turns, tuple) else list)(map(_fields, turns))
    lost: list[str] = []
    line = to_json(plain, lost)
    if new := [one for one in lost if not any(one in known for known in record.inexact)]:
        line = to_json(plain | {"inexact": [*record.inexact, *new]})
    return line


def record_of_line(line: str) -> StoredRollout:
    """Parse a rollout.

    Raises:
        StoreError: The line is not a rollout.
    """
    plain = from_json(line)
    if not isinstance(plain, Mapping) or "trajectory" not in plain:
        raise StoreError("a line must be an object with a 'trajectory'")
    values: dict[str, Any] = {**plain}
    trajectory: dict[str, Any] = {**values["trajectory"]}
    turns = trajectory["turns"]
    trajectory["turns"] = (tuple if isinstance(turns, tuple) else list)(Turn(**turn) for turn in turns)
    trajectory["stop_reason"] = StopReason(trajectory["stop_reason"])
    values["trajectory"] = Trajectory(**trajectory)
    values["created_at"] = datetime.fromisoformat(values["created_at"])
    return StoredRollout(**values)


def _fields(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}
