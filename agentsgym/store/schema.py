"""The columns of a rollout store: their types, their encodings on disk, and the version of the format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

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
"""The numbers of named rewards, in the order of ``component_names``: see :mod:`agentsgym.store.named`."""
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
