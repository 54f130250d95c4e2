"""Rollout stores whose files were damaged or written by somebody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from values import plain, texts

from agentsgym.store.columns import rollouts_to_table
from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import JSONS, SCHEMA, TURN_INTS, TURN_JSONS, Table
from agentsgym.store.values import to_json
from agentsgym.types import StopReason, Trajectory, Turn

_TYPES = [
    pa.null(),
    pa.bool_(),
    pa.int8(),
    pa.int64(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("ns"),
    pa.decimal128(20, 2),
    pa.list_(pa.int64()),
    pa.list_(pa.string()),
    pa.large_list(pa.int32()),
    pa.list_(pa.list_(pa.int32())),
    pa.struct([("a", pa.int64())]),
    pa.dictionary(pa.int32(), pa.string()),
    pa.list_(pa.struct([("start", pa.int64())])),
    pa.list_(pa.float64(), 2),
]
_JSON_TEXTS = st.one_of(
    plain.map(to_json),
    texts,
    st.sampled_from(
        [
            '{"$int":"' + "f" * 5000 + '"}',
            '{"$array":["<f8",[1000000000],""]}',
            '{"$array":["O",[1],"AAAA"]}',
            '{"$numpy":["<i8",""]}',
            '{"$numpy":[["<i8"],"AAAAAAAAAAA="]}',
            '{"$dict":[[[],1]]}',
            '{"$dict":3}',
            '{"$set":[[1]]}',
            '{"$unkept":[1]}',
            '{"$as":[]}',
            '{"$float":"zz"}',
            '{"$str":"d8"}',
            '{"$nothing":1}',
            '{"$bytes":"é"}',
            "[" * 3000,
            "9" * 5000,
            "NaN",
            "[null]",
            '[{"role":null}]',
            '[{"content":1}]',
            '""',
            '{"role":"user"}',
            '[{"role":"assistant","content":"a","tool_calls":3}]',
            '{"success":{"$set":[]}}',
            '[{"role":"assistant","content":[{"type":"text"}],"tool_calls":[null]}]',
            '{"success":"\ud800"}'.encode("utf-8", "replace").decode(),
            '{"turns":[{}]}',
            '{"turns":3}',
            '{"token_ids":"abc"}',
            '{"info":null}',
            '{"final_reward":"x"}',
            '{"token_ids":[-1,null,2.5,true]}',
            '{"logprobs":{"$tuple":[null]}}',
            '{"step":"x"}',
            '{"turns":[{"start":"0","stop":1,"reward":0}]}',
            '{"run":3}',
            '{"final_reward":{"$int":"0x1' + "0" * 400 + '"}}',
        ]
    ),
)


def sound_table() -> Table:
    """Four rollouts of two tasks, with everything that training stores."""
    records: list[StoredRollout] = []
    for index in range(4):
        message = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
        trajectory = Trajectory(
            token_ids=[5, 6, 7, 8, 9, 10],
            turns=[
                Turn(start=1, stop=3, reward=0.5, message_index=1),
                Turn(start=4, stop=6, reward=0.5, message_index=3),
            ],
            messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}, message, message],
            final_reward=float(index),
            stop_reason=StopReason.DONE,
            logprobs=[-0.5] * 6,
            per_token_rewards=[0.25] * 6,
            task_index=index // 2,
            rollout_index=index % 2,
            task_data={"goods": ["egg"], "times": None, "prices": {"egg": 2}, "seed": index // 2},
            info={"success": index % 2 == 0, "steps": 2},
        )
        config = {"max_steps_per_episode": 3}
        credit = {"credit": {"advantage_estimator": "grpo"}}
        records.append(
            StoredRollout(
                trajectory=trajectory,
                env_class_path="agentsgym.envs.PriceListEnv",
                env_config=config,
                extra=credit,
                source="training",
                step=1,
                generation=1,
                group=index // 2,
                advantages=[0.0] * 6,
                entropies=[0.1] * 6,
                trainer_logprobs=[-0.4] * 6,
                policy_version=1,
                agent="a",
                run="r",
            )
        )
    return rollouts_to_table(records)


_SOUND = sound_table()
_JSON_COLUMNS = (*JSONS, "env_config", "tools", "extra", "corrections")
_turns = st.fixed_dictionaries(
    {name: st.one_of(st.none(), st.integers(-2, 8), st.sampled_from([2**62, -(2**63)])) for name in TURN_INTS}
    | {"reward": st.none() | st.floats(), "potential": st.none() | st.floats()}
    | {"invalid": st.sampled_from([None, True, False]), "exact": st.sampled_from([None, True, False])}
    | {name: st.none() | _JSON_TEXTS for name in TURN_JSONS}
)
_int64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 8)


def _cell(name: str) -> st.SearchStrategy[Any]:  # noqa: PLR0911  # a table by type
    """Values that arrow can keep in a column of the right type."""
    kind = SCHEMA.field(name).type
    if name == "turns":
        return st.none() | st.lists(st.none() | _turns, max_size=3)
    if name in _JSON_COLUMNS:
        return st.none() | _JSON_TEXTS
    if pa.types.is_string(kind):
        return st.none() | texts
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        return st.none() | _int64
    if pa.types.is_floating(kind):
        return st.none() | st.floats()
    if pa.types.is_boolean(kind):
        return st.sampled_from([None, True, False])
    inner = {pa.float64(): st.floats(), pa.int32(): st.integers(-(2**31), 2**31 - 1), pa.int64(): _int64}
    items = inner.get(kind.value_type, texts if pa.types.is_string(kind.value_type) else st.booleans())
    return st.none() | st.lists(st.none() | items, max_size=9)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError):
        return None


@st.composite
def crafted_tables(draw: st.DrawFn) -> Table:
    """A table of rollouts with one or two columns spoiled."""
    table = _SOUND
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(table.column_names))
        place = table.column_names.index(name)
        if draw(st.integers(0, 9)) == 0:
            table = table.drop_columns([name])
            continue
        own = SCHEMA.field(name).type
        old = table.column(name).to_pylist()
        if draw(st.booleans()):
            kind = draw(st.sampled_from(_TYPES))
            values = draw(
                st.sampled_from([old, [None] * 4, [1] * 4, ["1"] * 4, [0.5] * 4, [[1, 2]] * 4, [{"a": 1}] * 4])
            )
        else:
            kind = own
            values = [draw(_cell(name)) if draw(st.booleans()) else value for value in old]
        column = _column(values, kind)
        if column is not None:
            table = table.set_column(place, name, column)
    return table.replace_schema_metadata(SCHEMA.metadata)


def write_table(table: Table, folder: Path, *, name: str = "part.parquet") -> None:
    """Write a table as a file of a store."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / name)


def _sound_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(_SOUND, sink)
    return sink.getvalue().to_pybytes()


_BYTES = _sound_bytes()
_PART = "part-v1-20260101T000000.000000000-abc-000001-{}.parquet"


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[str, bytes | str]:
    """The name of a file in a store, and its bytes or what stands in its place: a folder, or a loop of links."""
    name = draw(
        st.sampled_from(["a.parquet", _PART.format(4), _PART.format(3), _PART.format("9" * 30), "b.unfinished"])
    )
    kind = draw(st.sampled_from(["cut", "flipped", "replaced", "empty", "folder", "loop", "dangling", "fifo", "other"]))
    if kind == "cut":
        return name, _BYTES[: draw(st.integers(0, len(_BYTES) - 1))]
    if kind == "flipped":
        data = bytearray(_BYTES)
        for _ in range(draw(st.integers(1, 4))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return name, bytes(data)
    if kind == "replaced":
        return name, b"PAR1" + draw(st.binary(max_size=40)) + b"PAR1"
    return name, b"" if kind == "empty" else kind


def put(path: Path, content: bytes | str) -> None:
    """Make a file, or what stands in its place."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "other":
        pq.write_table(pa.table({"a": [1]}), path)
    else:
        path.symlink_to(path.name if content == "loop" else "nowhere")
