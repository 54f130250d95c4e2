"""The columns of a rollout store: their types, their encodings on disk, and the version of the format.

Named rewards take four columns: the names, once per rollout, and the numbers in the order of the names. A column has
one number per name for the final reward, for each turn, and for each role of each turn with rewards by role. NaN stands
for a name that a reward lacks; a reward of which all are NaN was a plain number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from agentsgym.errors import StoreError
from agentsgym.store.values import is_utf8
from agentsgym.types import Trajectory, Turn

if TYPE_CHECKING:
    Table: TypeAlias = Any  # pyarrow is untyped: these aliases limit the spread of unknown types
    Expression: TypeAlias = Any
else:
    Table = pa.Table
    Expression = pc.Expression

VERSION: Final = 1
VERSION_KEY: Final = b"agentsgym.rollouts"

INTS: Final = ("task_index", "rollout_index", "num_retries", "num_close_errors")
"""Trajectory fields stored as integer columns."""
METADATA_INTS: Final = ("step", "generation", "group", "policy_version")
"""Metadata fields stored as integer columns."""
METADATA_TEXTS: Final = ("run", "source", "agent", "env_class_path", "tokenizer")
"""Metadata fields stored as text columns."""
JSONS: Final = ("info", "task_data", "final_rewards", "messages")
"""Trajectory fields stored as columns of JSON text."""
FLOATS: Final = ("logprobs", "per_token_rewards")
"""Trajectory fields with one number per token."""
METADATA_FLOATS: Final = ("advantages", "trainer_logprobs", "entropies")
"""Metadata fields with one number per token."""
COMPONENTS: Final = ("final_components", "turn_components", "role_components")
"""The numbers of named rewards, in the order of ``component_names``."""
Components = Mapping[str, float] | None
NO_COLUMNS: Final[Mapping[str, Any]] = dict.fromkeys(("component_names", *COMPONENTS))
TURN_COLUMNS: Final = {"policy_version": "turn_policy_versions", "parent": "turn_parents"}
"""Turn fields with a column of their own, null if no turn has a value: ``turns`` must keep the type of old parts."""
ADDED_LATER: Final = ("tokenizer", "entropies", "tools", *TURN_COLUMNS.values(), "component_names", *COMPONENTS)
"""Columns that parts written by earlier releases lack; they are read as null."""
TURN_INTS: Final = ("start", "stop", "episode", "message_index", "prompt_start")
TURN_FLAGS: Final = ("invalid", "exact")
TURN_JSONS: Final = ("state_key", "role", "role_rewards", "prompt_messages")

TURN: Final = pa.struct(
    [
        *(pa.field(name, pa.int64()) for name in TURN_INTS),
        *(pa.field(name, pa.bool_()) for name in TURN_FLAGS),
        pa.field("reward", pa.float64()),
        pa.field("potential", pa.float64()),
        *(pa.field(name, pa.string()) for name in TURN_JSONS),
    ]
)
SCHEMA: Final = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in METADATA_TEXTS),
        pa.field("env_config", pa.string()),
        pa.field("tools", pa.string()),
        pa.field("created_at", pa.timestamp("us", tz="UTC")),
        *(pa.field(name, pa.int64()) for name in METADATA_INTS),
        *(pa.field(name, pa.int64()) for name in INTS),
        pa.field("session_id", pa.string()),
        pa.field("seed", pa.int64()),
        pa.field("final_reward", pa.float64()),
        pa.field("stop_reason", pa.string()),
        pa.field("success", pa.bool_()),
        *(pa.field(name, pa.int64()) for name in ("num_turns", "num_tokens", "num_agent_tokens")),
        pa.field("error", pa.string()),
        *(pa.field(name, pa.string()) for name in JSONS),
        pa.field("extra", pa.string()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("agent_token_mask", pa.list_(pa.bool_())),
        *(pa.field(name, pa.list_(pa.float64())) for name in (*FLOATS, *METADATA_FLOATS)),
        pa.field("turns", pa.list_(TURN)),
        *(pa.field(name, pa.list_(pa.int64())) for name in TURN_COLUMNS.values()),
        pa.field("component_names", pa.string()),
        *(pa.field(name, pa.list_(pa.float64())) for name in COMPONENTS),
        pa.field("corrections", pa.string()),
        pa.field("inexact", pa.list_(pa.string())),
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)
SCALARS: Final = tuple(field.name for field in SCHEMA if not pa.types.is_nested(field.type))
"""The columns with one value per rollout, all of which a filter expression may use."""

# Half of the bytes of a float64 that was a float32 are 0: grouped by byte position, they compress to almost nothing.
SPLIT: Final = tuple(f"{name}.list.element" for name in (*FLOATS, *METADATA_FLOATS))
DICTIONARY: Final = tuple(
    field.name for field in SCHEMA if pa.types.is_string(field.type) and field.name not in {"messages", "session_id"}
)


def columns_of(trajectory: Trajectory) -> Mapping[str, Any]:
    """Return the values of the columns; all None without named rewards."""
    roles = [_by_role(turn) for turn in trajectory.turns]
    rows: dict[str, list[Components]] = {
        "final_components": [trajectory.final_components],
        "turn_components": [turn.components for turn in trajectory.turns],
        "role_components": [one for own in roles for one in own],
    }
    given = [one for own in rows.values() for one in own if one is not None]
    if not given:
        return NO_COLUMNS
    names = [*dict.fromkeys(name for one in given for name in one)]
    are_names = all(type(name) is str and name and is_utf8(name) for name in names)
    if not are_names or not all(_is_exact(one, names) for one in given):
        raise ValueError("the components are not finite floats by name, in one order")
    return {"component_names": json.dumps(names, ensure_ascii=False)} | {
        column: [(one or {}).get(name, math.nan) for one in own for name in names]
        if any(one is not None for one in own)
        else None
        for column, own in rows.items()
    }


def with_components(trajectory: Trajectory, names: Any, numbers: Mapping[str, Sequence[float] | None]) -> Trajectory:
    """Restore the components of a trajectory from the values of its columns."""
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnknownVariableType]
        raise StoreError(f"component_names must be a list of names, got {names!r}")
    keys: list[str] = names  # pyright: ignore[reportUnknownVariableType]
    turns = trajectory.turns
    num_roles = sum(len(turn.role_rewards or ()) for turn in turns)
    counts = dict(zip(COMPONENTS, (1, len(turns), num_roles), strict=True))
    rows = {column: _rows(column, numbers[column], keys, count) for column, count in counts.items()}
    by_role, pairs = iter(rows["role_components"]), list[Any]()
    for turn, components in zip(turns, rows["turn_components"], strict=True):
        own = {role: one for role, one in zip(turn.role_rewards or (), by_role, strict=False) if one is not None}
        pairs.append((components, own or None))
    return from_plain(trajectory, {"final": rows["final_components"][0], "turns": pairs})


def as_plain(trajectory: Trajectory) -> dict[str, Any]:
    """Return all components for :func:`from_plain`, if the columns cannot represent them."""
    turns = [(turn.components, turn.role_components) for turn in trajectory.turns]
    return {"final": trajectory.final_components, "turns": turns}


def from_plain(trajectory: Trajectory, plain: Any) -> Trajectory:
    """Restore the components from the result of :func:`as_plain`."""
    pairs = zip(trajectory.turns, plain["turns"], strict=True)
    restored = [replace(turn, components=own, role_components=by_role) for turn, (own, by_role) in pairs]
    kind = tuple if isinstance(trajectory.turns, tuple) else list
    return replace(trajectory, turns=kind(restored), final_components=plain["final"])


def _by_role(turn: Turn) -> list[Components]:
    named = turn.role_components
    if named is None:
        return [None] * len(turn.role_rewards or ())
    roles = [*(turn.role_rewards or ())]
    if type(named) is not dict or not named or [*named] != [role for role in roles if role in named]:
        raise ValueError("role_components must be a dict of roles that have rewards, in their order")
    return [named.get(role) for role in roles]  # pyright: ignore[reportUnknownMemberType]


def _is_exact(components: Mapping[str, Any], names: Sequence[str]) -> bool:
    is_plain = type(components) is dict and bool(components)  # pyright: ignore[reportUnknownArgumentType]
    are_finite = all(type(value) is float and math.isfinite(value) for value in components.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return is_plain and are_finite and [*components] == [name for name in names if name in components]


def _rows(column: str, numbers: Sequence[float] | None, names: Sequence[str], count: int) -> list[Components]:
    """Split the numbers of a column into the components of each reward."""
    size = len(names)
    if numbers is None:
        return [None] * count
    if len(numbers) != size * count:
        raise StoreError(f"{column} must have {count} x {size} numbers, got {len(numbers)}")
    rows = [numbers[start : start + size] for start in range(0, size * count, size)]
    return [{name: x for name, x in zip(names, row, strict=True) if not math.isnan(x)} or None for row in rows]
