"""What the fuzz found: malformed values that raised something else than an error of ours, or nothing for ever."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from agentsgym.agents.base import Agent
from agentsgym.credit.registry import get_estimator
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.tool_schemas import schemas_of
from agentsgym.errors import ConfigError, StoreError
from agentsgym.evaluation.compare import compare
from agentsgym.export import dpo_examples, sft_examples
from agentsgym.recipes.sections import values_of_yaml
from agentsgym.recorded.messages import trajectories_from_messages
from agentsgym.store.columns import rollouts_to_table
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import SCHEMA
from agentsgym.training.lifecycle.checkpoint_files import MANIFEST, problem_with, read_manifest
from agentsgym.types import Action, StopReason, Trajectory, Turn

SOUND = Trajectory(
    token_ids=[5, 6, 7],
    turns=[Turn(start=1, stop=3, reward=1.0, message_index=1)],
    messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
    final_reward=1.0,
    stop_reason=StopReason.DONE,
    per_token_rewards=[0.0, 0.5, 0.5],
    info={"success": True},
    task_data={"seed": 1},
)


def store_with(folder: Path, name: str, column: pa.Array) -> RolloutStore:
    """A store whose only rollout has another column."""
    table = rollouts_to_table([StoredRollout(trajectory=SOUND)])
    table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table.replace_schema_metadata(SCHEMA.metadata), folder / "part.parquet")
    return RolloutStore(folder)


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("turns", pa.array([3]), "the column 'turns' must be of type .*, got DataType"),
        ("token_ids", pa.array(["5"]), "the column 'token_ids' must be of type"),
        ("token_ids", pa.nulls(1, pa.list_(pa.int32())), "token_ids must be a list, got None"),
        ("token_ids", pa.array([[5, None, 7]], pa.list_(pa.int32())), "token_ids .* but 1 of them are missing"),
        ("logprobs", pa.array([[0.5]]), "logprobs needs one value per token, got 1 for 3"),
        ("messages", pa.array(["null"]), "messages must be a list of messages, .* got None"),
        ("messages", pa.array(["[true]"]), r"messages must be a list of messages, .* got \[True\]"),
        ("messages", pa.array(['[{"role":"user"}]']), "messages must be a list of messages"),
        ("info", pa.array(["1.5"]), "info must be a dict, got 1.5"),
        ("final_reward", pa.array([None], pa.float64()), "final_reward must be a number, got None"),
        ("task_index", pa.array([None], pa.int64()), "task_index must be an int, got None"),
        ("corrections", pa.array(['{"token_ids":["a"]}']), r"token_ids must be a list of numbers, got \['a'\]"),
        ("corrections", pa.array(['{"run":3}']), "run must be a string or None, got 3"),
        ("corrections", pa.array(["3"]), "corrections must be a dict, got 3"),
        ("created_at", pa.nulls(1, pa.timestamp("us", tz="UTC")), "created_at must be a timezone-aware datetime"),
    ],
)
def test_a_column_of_strangers_is_named(name: str, column: pa.Array, message: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=message):
        store_with(tmp_path, name, column).record(0)


def test_a_column_that_another_tool_wrote_with_a_wider_type_is_read(tmp_path: Path) -> None:
    store = store_with(tmp_path, "messages", pa.array([json.dumps(SOUND.messages)], pa.large_string()))
    assert store[0].messages == SOUND.messages
    assert store.table().schema.field("messages").type == pa.string()


def test_a_stored_text_that_is_not_utf_8_is_reported_with_its_file(tmp_path: Path) -> None:
    offsets, data = pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\x80r")
    store = store_with(tmp_path, "run", pa.StringArray.from_buffers(1, offsets, data))
    with pytest.raises(StoreError, match=r"part\.parquet can no longer be read: .*UTF8"):
        store.table(["run"])
    with pytest.raises(StoreError, match="UTF8"):
        store.record(0)


def test_a_pipe_in_a_store_is_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    os.mkfifo(tmp_path / "b.parquet.unfinished")
    assert [*RolloutStore(tmp_path).skipped.values()] == ["not a file"]


def test_an_answer_that_is_not_among_the_messages_cannot_be_exported(tmp_path: Path) -> None:
    turns = [{"start": 1, "stop": 3, "episode": 0, "message_index": 9, "prompt_start": 0, "invalid": False}]
    column = pa.array([[turns[0] | {"exact": True, "reward": 1.0}]], SCHEMA.field("turns").type)
    with pytest.raises(StoreError, match="the message_index of a turn is 9, but it has 2 messages"):
        [*sft_examples(store_with(tmp_path, "turns", column).records())]


def test_calls_that_are_null_are_no_calls() -> None:
    message: Any = {"role": "assistant", "content": "!", "tool_calls": None}
    records = [
        StoredRollout(trajectory=Trajectory(**{**fields_of(SOUND), "messages": [SOUND.messages[0], message], **more}))
        for more in ({}, {"final_reward": 0.0})
    ]
    assert [*dpo_examples(records)] == []


def fields_of(trajectory: Trajectory) -> dict[str, Any]:
    return {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}


@pytest.mark.parametrize(("name", "text"), [("task_data", "nonsense"), ("task_data", "3"), ("final_reward", None)])
def test_what_cannot_be_compared_reports_it(name: str, text: Any, tmp_path: Path) -> None:
    store = store_with(tmp_path, name, pa.array([text], SCHEMA.field(name).type))
    with pytest.raises((ConfigError, StoreError)):
        compare(store, store)


@pytest.mark.parametrize("text", ["!!int x", "!!bool x", "!!timestamp x", "2020-13-45", "!!float x"])
def test_a_value_of_yaml_that_does_not_fit_its_tag_is_named_with_its_line(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="line 2 has a value that is not a valid"):
        values_of_yaml(f"a: 1\nb: {text}")


@pytest.mark.parametrize("value", [[[]], {"a": 1}])
def test_a_configuration_that_contains_itself_is_refused(value: Any) -> None:
    deep: Any = value
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(ConfigError, match="must not contain itself or be nested more than"):
        PriceListEnv(None, {"chat_template_kwargs": {"a": deep}})


class Calls(Agent):
    def act(self, requests: Any) -> Any:
        return [Action(text="a", tool_calls=[["add"]]) for _ in requests]  # pyright: ignore[reportArgumentType]


def test_an_action_whose_calls_are_no_calls_fails_its_episode() -> None:
    env = PriceListEnv()
    [trajectory] = env.rollout(env.get_train_dataset(size=1), Calls())
    assert "an Action's tool_calls[0] must be a ToolCall" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_rewards": [1e200]}, r"turn_rewards must be a list of finite numbers within ±1e\+100, got \[1e\+200\]"),
        ({"turn_rewards": [float("nan")]}, "turn_rewards must be a list of finite numbers"),
        ({"final_reward": -1e200}, r"final_reward must be a finite number within ±1e\+100, got -1e\+200"),
        ({"final_reward": "1"}, "final_reward must be a finite number"),
        ({"turn_rewards": None}, "turn_rewards must be a list"),
        ({"group": []}, r"group must be an int, got \[\]"),
        ({"roles": [[]]}, "roles must be a list of hashable values"),
    ],
)
def test_a_scored_rollout_of_wrong_numbers_is_refused(fields: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {"turn_rewards": [1.0], "final_reward": 1.0, "group": 0, "state_keys": [None]}
    with pytest.raises(ConfigError, match=message):
        ScoredRollout(**sound | fields)


@pytest.mark.parametrize("scale", [np.array([1, 2]), None, 3])
def test_a_scale_that_is_no_name_is_refused(scale: Any) -> None:
    row = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None])
    with pytest.raises(ConfigError, match="scale cannot be"):
        get_estimator("grpo")([row, row], discount=1.0, scale=scale)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"$defs": "a"}, r"its \$defs must be a dict of JSON schemas, got 'a'"),
        ({"properties": {"a": {"enum": {"b": 1}}}}, "its enum must be a list"),
        ({"properties": {"a": {"anyOf": ["b"]}}}, "its anyOf must be a list of JSON schemas"),
        ({"properties": {"a": {"minimum": "b"}}}, "its minimum must be a number"),
    ],
)
def test_a_keyword_of_a_tool_that_no_call_can_be_checked_by_is_named(parameters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schemas_of([{"name": "f", "parameters": parameters}], "the test")


@pytest.mark.parametrize("field", ["role", "tool_calls", "refusal"])
def test_an_array_in_a_recorded_message_is_refused(field: str) -> None:
    message = {"role": "assistant", "content": "a"} | {field: np.array([1, 2])}
    with pytest.raises(ConfigError):
        trajectories_from_messages(None, [{"messages": [message], "reward": 1.0}])


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "put",
    [_pipe, *(lambda path, text=text: path.write_text(text) for text in ("[" * 9000, "[]", '{"files": {"a": []}}'))],
)
def test_a_manifest_that_is_damaged_in_any_way_is_called_so(put: Callable[[Path], Any], tmp_path: Path) -> None:
    put(tmp_path / MANIFEST)
    assert read_manifest(tmp_path) is None
    assert problem_with(tmp_path) == f"{MANIFEST} is damaged"
