"""Read stored rollouts from the rows of an arrow table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentsgym.errors import StoreError
from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import FLOATS, INTS, JSONS, OWN_FLOATS, OWN_INTS, OWN_TEXTS, TURN_JSONS, Table
from agentsgym.store.values import from_json
from agentsgym.texts import sentence_of, shown
from agentsgym.types import StopReason, Trajectory, Turn

_COPIED = (*INTS, "session_id", "final_reward", "error")


def record_of(table: Table, row: int) -> StoredRollout:
    """Read one row."""
    corrections = from_json(_value(table, "corrections", row) or "{}")
    own = {name: _value(table, name, row) for name in (*OWN_INTS, *OWN_TEXTS, "created_at")}
    for name in ("env_config", "tools"):
        text = _value(table, name, row)
        own[name] = None if text is None else from_json(text)
    own["extra"] = from_json(_value(table, "extra", row))
    own |= {name: _numbers(table, name, row) for name in OWN_FLOATS}
    own |= {name: value for name, value in corrections.items() if name in own}
    return StoredRollout(
        trajectory=_trajectory(table, row, corrections), inexact=_value(table, "inexact", row) or (), **own
    )


def trajectory_of(table: Table, row: int) -> Trajectory:
    """Read the trajectory of one row."""
    return _trajectory(table, row, from_json(_value(table, "corrections", row) or "{}"))


def _trajectory(table: Table, row: int, corrections: Mapping[str, Any]) -> Trajectory:
    try:
        return _built(table, row, corrections)
    except (ValueError, TypeError) as error:
        session = shown(_value(table, "session_id", row))
        raise StoreError(f"the rollout of session {session} is not a valid trajectory: {sentence_of(error)}") from error


def _built(table: Table, row: int, corrections: Mapping[str, Any]) -> Trajectory:
    values: dict[str, Any] = {name: _value(table, name, row) for name in _COPIED}
    values |= {name: from_json(_value(table, name, row)) for name in JSONS}
    values |= {name: _numbers(table, name, row) for name in ("token_ids", *FLOATS)}
    values["stop_reason"] = StopReason(_value(table, "stop_reason", row))
    versions = _value(table, "turn_policy_versions", row)
    values["turns"] = None if "turns" in corrections else _turns(_value(table, "turns", row), versions)
    values |= {name: value for name, value in corrections.items() if name in values}
    if "turns" in corrections:
        turns = [Turn(**turn, policy_version=version) for turn, version in _with(versions, corrections["turns"])]
        values["turns"] = tuple(turns) if isinstance(corrections["turns"], tuple) else turns
    return Trajectory(**values)


def _with(
    versions: Sequence[int | None] | None, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each turn beside its policy version."""
    return zip(rows, versions or [None] * len(rows), strict=True)


def _turns(rows: Sequence[dict[str, Any]], versions: Sequence[int | None] | None) -> list[Turn]:
    turns: list[Turn] = []
    for row, version in _with(versions, rows):
        keys: dict[str, Any] = {name: None if row[name] is None else from_json(row[name]) for name in TURN_JSONS}
        turns.append(Turn(**{**row, **keys}, policy_version=version))
    return turns


def _value(table: Table, name: str, row: int) -> Any:
    return table.column(name)[row].as_py()


def _numbers(table: Table, name: str, row: int) -> list[Any] | None:
    """One list of numbers, much faster than by ``as_py``."""
    values: Any = table.column(name)[row].values
    return None if values is None else values.to_numpy(zero_copy_only=False).tolist()
