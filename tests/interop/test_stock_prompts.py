"""Tasks written as prompts for a stock trainer, and read again."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

import agentsgym
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.interop import as_prompt, prompt_dataset
from agentsgym.interop.prompts import row_of

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_a_task_comes_back_as_it_was(task: dict[str, Any]) -> None:
    row = {"task_data": task, "env_class_path": "a.B", "env_config": {"x": 1}}
    assert row_of(as_prompt(row)) == row
    assert row_of([{"role": "system", "content": "{}"}, {"role": "user", "content": as_prompt(row)}]) == row


def test_rows_of_several_environments_go_through_a_dataset() -> None:
    rows = agentsgym.mix(
        {"easy": (TwentyQuestionsEnv, {}), "short": (TwentyQuestionsEnv, {"max_steps_per_episode": 3})}
    )
    prompts = prompt_dataset(rows)
    assert prompts.column_names == ["prompt"]
    for row, prompt in zip(rows, prompts["prompt"], strict=True):
        found = row_of(prompt)
        assert found == {name: row[name] for name in found}
        assert {"env_class_path", "env_config", "task_data", "environment"} <= found.keys()


def test_a_stream_stays_a_stream() -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"task_data": {"seed": 1}}]))
    prompts = prompt_dataset(stream)
    assert isinstance(prompts, IterableDataset)
    assert [row_of(row["prompt"]) for row in prompts] == [{"task_data": {"seed": 1}}]


def test_with_an_instruction_the_row_stands_beside_the_prompt() -> None:
    made = prompt_dataset([{"seed": 3}], instruction="Play.")
    assert made[0]["prompt"] == [{"role": "user", "content": "Play."}]
    assert row_of(made[0]["task"]) == {"task_data": {"seed": 3}}


@pytest.mark.parametrize("prompt", ["What color is the sky?", [{"role": "user", "content": "Hello"}], None, 3, "[1]"])
def test_another_prompt_is_refused_with_the_remedy(prompt: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt 2 must contain a task .*prompt_dataset\(rows\)"):
        row_of(prompt, "prompt 2")


def test_what_json_cannot_hold_is_refused_before_training() -> None:
    with pytest.raises(TaskError, match="JSON-serializable"):
        as_prompt({"task_data": {"player": object()}})
    with pytest.raises(TaskError, match="must be a dict"):
        prompt_dataset(["look"])
    with pytest.raises(ConfigError, match="at least one row"):
        prompt_dataset(Dataset.from_list([]))
