"""The columns of a rollout store: their types, their encodings on disk, and the version of the format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    Table: TypeAlias = Any  # pyarrow is untyped: these aliases keep that from spreading
    Expression: TypeAlias = Any
else:
    Table = pa.Table
    Expression = pc.Expression

VERSION: Final = 1
VERSION_KEY: Final = b"agentsgym.rollouts"

INTS: Final = ("task_index", "rollout_index", "num_retries", "num_close_errors")
"""Fields of a trajectory that are columns of integers."""
OWN_INTS: Final = ("step", "generation", "group", "policy_version")
"""The same for a stored rollout's metadata."""
OWN_TEXTS: Final = ("run", "source", "agent", "env_class_path", "tokenizer")
"""Metadata that are columns of text."""
JSONS: Final = ("info", "task_data", "final_rewards", "messages")
"""Fields of a trajectory that are columns of JSON text."""
FLOATS: Final = ("logprobs", "per_token_rewards")
"""Fields of a trajectory with one number per token."""
OWN_FLOATS: Final = ("advantages", "trainer_logprobs", "entropies")
"""The same for a stored rollout's metadata."""
LATER: Final = ("tokenizer", "entropies", "tools", "turn_policy_versions")
"""Columns that parts of earlier releases lack, and that are then read as null."""
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
        *(pa.field(name, pa.string()) for name in OWN_TEXTS),
        pa.field("env_config", pa.string()),
        pa.field("tools", pa.string()),
        pa.field("created_at", pa.timestamp("us", tz="UTC")),
        *(pa.field(name, pa.int64()) for name in OWN_INTS),
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
        *(pa.field(name, pa.list_(pa.float64())) for name in (*FLOATS, *OWN_FLOATS)),
        pa.field("turns", pa.list_(TURN)),
        pa.field("turn_policy_versions", pa.list_(pa.int64())),
        pa.field("corrections", pa.string()),
        pa.field("inexact", pa.list_(pa.string())),
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)
SCALARS: Final = tuple(one.name for one in SCHEMA if not pa.types.is_nested(one.type))
"""The columns with one value per rollout, which filters read by default."""

# Half of the bytes of a float64 that was a float32 are 0: split by byte, they cost nothing.
SPLIT: Final = tuple(f"{name}.list.element" for name in (*FLOATS, *OWN_FLOATS))
DICTIONARY: Final = tuple(
    one.name for one in SCHEMA if pa.types.is_string(one.type) and one.name not in {"messages", "session_id"}
)
