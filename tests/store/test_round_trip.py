"""What is stored comes back bit for bit, or is marked."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from array import array
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, RolloutStore, StopReason, StoreError, Trajectory, Turn
from agentsgym.store.columns import record_from_row, rollouts_to_table
from agentsgym.store.records import StoredRollout, record_from_line, record_to_line
from agentsgym.store.values import Unkept, from_json, to_json

FLOATS = st.floats(width=64) | st.sampled_from([math.nan, -0.0, math.inf, -math.inf])
TEXTS = st.text(st.characters(), max_size=6) | st.just("\ud83d\ude00")  # halves that are not to become one character
INTS = st.integers() | st.sampled_from([2**63, -(2**63), -(2**63) - 1, 10**4000])
KEYS = st.recursive(st.none() | st.booleans() | INTS | TEXTS | st.binary(max_size=4), lambda key: st.tuples(key, key))
VALUES = st.recursive(
    KEYS | FLOATS | st.frozensets(TEXTS, max_size=3),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(KEYS, value, max_size=3) | st.tuples(value),
    max_leaves=8,
)
COMPONENTS = st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.5, -1.0])) | st.dictionaries(TEXTS, FLOATS)
OBJECTS = st.dictionaries(TEXTS | st.sampled_from(["$", "$tuple", "success"]), VALUES, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXTS},
        optional={"tool_calls": st.lists(OBJECTS, max_size=2), "name": TEXTS, "$dict": TEXTS},
    ),
    max_size=3,
)


def bits(value: Any) -> Any:
    """A value that is equal for equal types and bits alone: -0.0 is not 0.0, NaN is NaN, a tuple no list."""
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    if isinstance(value, list | tuple):
        return type(value), [bits(one) for one in value]
    if isinstance(value, dict):
        return "dict", [(bits(key), bits(one)) for key, one in value.items()]
    if dataclasses.is_dataclass(value):
        return type(value), [bits(getattr(value, one.name)) for one in dataclasses.fields(value)]
    return type(value), value


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    cuts = sorted(draw(st.lists(st.integers(0, 12), max_size=6)))
    turns = [
        Turn(
            start=start,
            stop=stop,
            reward=draw(FLOATS),
            invalid=draw(st.booleans()),
            exact=draw(st.booleans()),
            episode=draw(st.integers(0, 3)),
            message_index=draw(st.integers(0, 2**40)),
            state_key=draw(KEYS),
            role=draw(KEYS),
            potential=draw(st.none() | FLOATS),
            prompt_messages=draw(st.none() | MESSAGES),
            role_rewards=draw(st.none() | st.dictionaries(KEYS, FLOATS, max_size=2)),
            components=draw(st.none() | COMPONENTS),
            role_components=draw(st.none() | st.dictionaries(KEYS, COMPONENTS, max_size=2)),
            policy_version=draw(st.none() | st.integers(0, 2**63 - 1)),
            parent=draw(st.none() | st.integers(0, k - 1)) if k else None,
        )
        for k, (start, stop) in enumerate(zip(cuts[::2], cuts[1::2], strict=False))
    ]

    def numbers() -> Any:
        return st.lists(FLOATS, min_size=12, max_size=12)

    return Trajectory(
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1) | st.just(2**40), min_size=12, max_size=12)),
        turns=turns if draw(st.booleans()) else tuple(turns),
        messages=draw(MESSAGES),
        final_reward=draw(FLOATS),
        stop_reason=draw(st.sampled_from(StopReason)),
        logprobs=draw(st.none() | numbers() | numbers().map(tuple)),
        per_token_rewards=draw(st.just(()) | numbers()),
        session_id=draw(TEXTS),
        task_index=draw(INTS),
        rollout_index=draw(st.integers(0, 9)),
        info=draw(OBJECTS),
        error=draw(st.none() | TEXTS),
        num_close_errors=draw(st.integers(0, 3)),
        num_retries=draw(st.integers(0, 3)),
        final_rewards=draw(st.dictionaries(KEYS, FLOATS, max_size=2)),
        final_components=draw(st.none() | COMPONENTS),
        task_data=draw(OBJECTS),
    )


RECORDS = st.builds(
    StoredRollout,
    trajectory=trajectories(),
    source=st.sampled_from(["evaluation", "training"]) | TEXTS,
    env_class_path=st.none() | TEXTS,
    env_config=st.none() | OBJECTS,
    tools=st.none() | st.lists(OBJECTS, max_size=2),
    step=st.none() | st.integers(-(2**63), 2**63 - 1),
    group=st.none() | st.integers(0, 9),
    advantages=st.none() | st.lists(FLOATS, min_size=12, max_size=12),
    trainer_logprobs=st.none() | st.lists(FLOATS, min_size=12, max_size=12),
    entropies=st.none() | st.lists(FLOATS, min_size=12, max_size=12),
    tokenizer=st.none() | TEXTS,
    policy_version=st.none() | st.integers(0, 9),
    agent=st.none() | TEXTS,
    run=st.none() | TEXTS,
    extra=OBJECTS,
)


@given(st.lists(RECORDS, min_size=1, max_size=3))
def test_records_come_back_bit_for_bit(records: list[StoredRollout]) -> None:
    table = rollouts_to_table(records)
    for row, record in enumerate(records):
        assert bits(record_from_row(table, row)) == bits(record)


@given(RECORDS)
def test_lines_of_json_come_back_bit_for_bit(record: StoredRollout) -> None:
    line = record_to_line(record)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert bits(record_from_line(line)) == bits(record)


@given(VALUES)
def test_values_come_back_bit_for_bit_and_as_strict_json(value: Any) -> None:
    lost: list[str] = []
    text = to_json(value, lost)
    text.encode()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert bits(from_json(text)) == bits(value)
    assert not lost


def record_of_info(info: dict[str, Any]) -> StoredRollout:
    trajectory = Trajectory(
        token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE, info=info
    )
    return record_from_row(rollouts_to_table([StoredRollout(trajectory=trajectory)]), 0)


def test_numbers_of_numpy_come_back_as_they_were() -> None:
    given = {"scalar": np.float32(0.1), "flag": np.bool_(True), "board": np.array([[1, 2]], dtype=np.int8)}
    read = record_of_info(given).trajectory.info
    assert {name: value.dtype for name, value in read.items()} == {name: value.dtype for name, value in given.items()}
    assert read["scalar"] == given["scalar"]
    assert read["board"].tolist() == [[1, 2]]


class Color(StrEnum):
    RED = "red"


class Board:
    def __repr__(self) -> str:
        return "three in a row"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_cannot_be_kept_is_marked_and_loses_nothing_else() -> None:
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    given = {"board": Board(), "broken": Broken(), "color": Color.RED, "itself": itself, "deep": deep, "move": (1, 2)}
    given["method"] = str.upper  # names no module
    record = record_of_info(given)
    read = record.trajectory.info
    assert read["board"] == Unkept(f"{__name__}.Board", "three in a row")
    assert read["method"] == Unkept("builtins.method_descriptor", "str.upper")
    assert read["broken"].text.startswith("<Broken object: its repr raised")
    assert (read["color"], read["move"]) == ("red", (1, 2))
    assert "info: only the text of Board was stored" in record.inexact
    assert "info: Color stored as str" in record.inexact
    assert isinstance(read["itself"][0], Unkept)
    again = record_from_row(rollouts_to_table([record]), 0)  # and a copy of the store holds the same
    assert (again.trajectory, again.inexact[: len(record.inexact)]) == (record.trajectory, record.inexact)


def test_a_copy_of_a_copy_knows_no_more_of_what_was_lost_than_the_first(tmp_path: Path) -> None:
    record = record_of_info({"board": Board()})
    for number in range(3):
        with RolloutStore.writer(tmp_path / str(number)) as writer:
            writer.add_record(record)
        lines = RolloutStore(tmp_path / str(number)).to_jsonl(tmp_path / f"{number}.jsonl")
        record = RolloutStore.from_jsonl(lines, tmp_path / f"{number} again").record(0)
        assert record.inexact == ["info: only the text of Board was stored"]


def test_texts_of_numpy_are_kept_as_texts() -> None:
    given = {"word": np.str_("clock"), "bytes": np.bytes_(b"a"), "words": np.array([["a", "b"]])}
    record = record_of_info(given)
    assert record.trajectory.info == {"word": "clock", "bytes": b"a", "words": [["a", "b"]]}
    assert "info: str_ stored as str" in record.inexact


@pytest.mark.parametrize("reward", [True, np.float32(1.0), 2**60 + 1])
def test_columns_have_a_reward_that_is_no_float_as_the_nearest_one(tmp_path: Path, reward: Any) -> None:
    turn = Turn(start=0, stop=0, reward=reward, message_index=np.int64(1), role="x")  # pyright: ignore[reportArgumentType]
    given = dataclasses.replace(record_of_info({}).trajectory, final_reward=reward, turns=[turn])
    with RolloutStore.writer(tmp_path) as writer:
        writer.add(given)
    store = RolloutStore(tmp_path)
    [row] = store.table(["final_reward", "turns"]).to_pylist()
    [seen] = row["turns"]
    assert (row["final_reward"], seen["reward"], seen["message_index"]) == (float(reward), float(reward), 1)
    assert (store[0], type(store[0].final_reward)) == (given, type(reward))


def test_arrays_in_the_place_of_lists_come_back_and_other_sequences_are_marked() -> None:
    trajectory = Trajectory(
        token_ids=np.array([5, 6, 7]),
        turns=[],
        messages=[],
        final_reward=0,
        stop_reason=StopReason.DONE,
        logprobs=array("d", [0.5, math.nan, -0.0]),
        per_token_rewards=[0, 1, 2**60 + 1],
    )
    record = record_from_row(rollouts_to_table([StoredRollout(trajectory=trajectory)]), 0)
    read: Any = record.trajectory
    assert isinstance(read.token_ids, np.ndarray)
    assert read.token_ids.tolist() == [5, 6, 7]
    assert bits(read.logprobs) == bits([0.5, math.nan, -0.0])
    assert record.inexact == ["logprobs: array stored as list"]
    assert read.per_token_rewards == [0, 1, 2**60 + 1]


@pytest.mark.parametrize(
    "text", ['{"$nothing": 1}', "{", '{"$float": "xyz"}', '{"$array": ["O", [1], ""]}', '{"$set": 1}']
)
def test_a_text_that_nobody_wrote_is_an_error_with_the_text(text: str) -> None:
    with pytest.raises(StoreError, match="a stored value cannot be read"):
        from_json(text)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"stepp": 1}, "'stepp' is not a field of a stored rollout; did you mean 'step'?"),
        ({"step": "one"}, "step must be a 64-bit int"),
        ({"advantages": [1.0]}, "advantages must have one value per token, got 1 for 2 tokens"),
        ({"agent": 3}, "agent must be a string or None"),
        ({"created_at": "today"}, "created_at must be a timezone-aware datetime"),
        ({"created_at": datetime(2026, 1, 1)}, "created_at must be a timezone-aware datetime"),
    ],
)
def test_columns_that_are_none_are_refused_at_once(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    trajectory = Trajectory(token_ids=[1, 2], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE)
    with RolloutStore.writer(tmp_path) as writer, pytest.raises(ConfigError, match=message):
        writer.add(trajectory, **columns)


def test_a_file_is_read_by_plain_pyarrow(tmp_path: Path) -> None:
    trajectory = Trajectory(
        token_ids=[7, 8, 9],
        turns=[Turn(start=1, stop=3, reward=0.5, role="x")],
        messages=[{"role": "user", "content": "<b>häßlich</b>"}],
        final_reward=0.5,
        stop_reason=StopReason.DONE,
        logprobs=[0.0, -0.5, -0.25],
        info={"success": True},
        task_data={"seed": 3},
    )
    with RolloutStore.writer(tmp_path, source="evaluation", env_config={"max_steps_per_episode": 2}) as writer:
        writer.add(trajectory, advantages=[0.0, 1.5, 1.5])
    [file] = tmp_path.glob("*.parquet")
    [row] = pq.read_table(file).to_pylist()
    assert row["token_ids"] == [7, 8, 9]
    assert row["agent_token_mask"] == [False, True, True]
    assert row["advantages"] == [0.0, 1.5, 1.5]
    assert json.loads(row["messages"]) == trajectory.messages
    assert json.loads(row["env_config"]) == {"max_steps_per_episode": 2}
    assert (row["seed"], row["success"], row["num_agent_tokens"], row["stop_reason"]) == (3, True, 2, "done")
    assert [(turn["start"], turn["stop"], turn["reward"], turn["role"]) for turn in row["turns"]] == [
        (1, 3, 0.5, '"x"')
    ]


def named_turns(num_turns: int) -> Trajectory:
    """A game of two roles in which each reward has two names."""
    turns = [
        Turn(
            start=k,
            stop=k + 1,
            reward=1.5,
            role="XO"[k % 2],
            role_rewards={"X": 1.5, "O": -0.5},
            components={"correct": 1.0, "format": 0.5},
            role_components={"X": {"correct": 1.0, "format": 0.5}, "O": {"format": -0.5}},
        )
        for k in range(num_turns)
    ]
    return Trajectory(
        token_ids=[0] * num_turns,
        turns=turns,
        messages=[],
        final_reward=1.5 * num_turns,
        final_components={"correct": 1.0 * num_turns, "format": 0.5 * num_turns},
        stop_reason=StopReason.DONE,
    )


def test_names_are_stored_once_a_rollout_and_only_where_there_are_any(tmp_path: Path) -> None:
    plain = Trajectory(token_ids=[], turns=[], messages=[], final_reward=1.0, stop_reason=StopReason.DONE)
    with RolloutStore.writer(tmp_path) as writer:
        for one in (plain, named_turns(3)):
            writer.add(one)
    store = RolloutStore(tmp_path)
    assert [*store] == [plain, named_turns(3)]
    columns = ["component_names", "final_components", "turn_components", "role_components"]
    first, second = store.table(columns).to_pylist()
    assert first == dict.fromkeys(columns)
    assert second["component_names"] == '["correct", "format"]'
    assert second["final_components"] == [3.0, 1.5]
    assert second["turn_components"] == [1.0, 0.5] * 3
    assert len(second["role_components"]) == 3 * 2 * 2
    for row in store.table(["corrections"]).to_pylist():
        assert "components" not in json.loads(row["corrections"] or "{}")


def test_named_rewards_cost_no_key_more_than_their_numbers(tmp_path: Path) -> None:
    sizes = {}
    for name in ("correct", "correct" * 100):
        turns = [Turn(start=k, stop=k + 1, reward=k / 8, components={name: k / 8}) for k in range(100)]
        with RolloutStore.writer(tmp_path / name[:20]) as writer:
            for _ in range(20):
                writer.add(replace(named_turns(100), turns=turns, final_components={name: 1.0}))
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name[:20]).rglob("*.parquet"))
    short, long = sizes.values()
    assert long - short < 5 * 700  # the name stands in the file and its statistics, not in each of 2,000 turns


@pytest.mark.parametrize(
    ("column", "value"), [("component_names", '"a"'), ("component_names", "[1]"), ("turn_components", [1.0])]
)
def test_components_that_do_not_fit_are_named(column: str, value: Any) -> None:
    table = rollouts_to_table([StoredRollout(trajectory=named_turns(2))])
    place = table.schema.get_field_index(column)
    damaged = table.set_column(place, table.schema.field(place), pa.array([value], type=table.schema.field(place).type))
    with pytest.raises(StoreError, match=column):
        record_from_row(damaged, 0)
