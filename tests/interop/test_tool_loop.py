"""Environments as TRL's tool loop plays them, and tasks written as prompts for a stock trainer."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

import agentsgym
from agentsgym import ConfigError, TaskError
from agentsgym.envs import ToolEnv, TwentyQuestionsEnv
from agentsgym.interop import as_environment_factory, as_prompt, prompt_dataset
from agentsgym.interop.prompts import row_of


def tools_of(environment: object) -> dict[str, Any]:
    """The tools that TRL finds: public functions of the class, beside what it calls itself."""
    found = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in found if not name.startswith("_") and name not in {"reset", "get_reward"}]
    return {name: getattr(environment, name) for name in names}


def row(**task: Any) -> dict[str, Any]:
    """A row as TRL hands it to ``reset``."""
    return prompt_dataset([task], instruction="Play.")[0]


def questions(**config: Any) -> Any:
    return as_environment_factory(TwentyQuestionsEnv(env_config={"max_steps_per_episode": 3, **config}))


def test_a_text_game_is_played_by_one_tool() -> None:
    environment = questions()()
    [(name, act)] = tools_of(environment).items()
    schema = get_json_schema(act)["function"]
    assert (name, schema["name"]) == ("act", "act")
    assert schema["parameters"]["required"] == ["action"]
    env = TwentyQuestionsEnv()
    task = dict(env.get_train_dataset(size=1)[0]["task_data"])
    first = environment.reset(**row(**task))
    assert "question" in first.lower()
    assert first.startswith("\n\n")  # TRL adds it to the prompt as it is
    assert environment.reset(task_data=task) == first.strip()
    output = act(action=f"Is it a {task['solution']}?")
    assert output.strip()
    assert first not in output  # only what is new
    while not output.endswith("The episode is over."):
        output = act(action="Is it alive?")
    with pytest.raises(ValueError, match="over"):
        act(action="Is it alive?")
    assert isinstance(environment.get_reward(), float)


def test_instances_share_nothing_and_can_be_used_again() -> None:
    factory = questions()
    one, other = factory(), factory()
    task = dict(TwentyQuestionsEnv().get_train_dataset(size=1)[0]["task_data"])
    starts = [environment.reset(**row(**task)) for environment in (one, other)]
    assert starts[0] == starts[1]
    for _ in range(3):
        last = one.act(action="Is it alive?")
    assert last.endswith("over.")
    assert not other.act(action="Is it alive?").endswith("over.")
    assert one.reset(**row(**task)) == starts[0]
    assert len(factory._env.active_states) == 2  # what is over is closed


class Secret(TwentyQuestionsEnv):
    """Answers its seed."""

    def _format_prompt(self, state: Any, step: int) -> str:
        return str(state["chance"])

    def _initialize_episode(self, session_id: str, task_data: Any) -> Any:
        return {**super()._initialize_episode(session_id, task_data), "chance": self.rng(session_id).random()}


def test_rollouts_of_a_task_group_play_one_game_and_equal_rows_play_others() -> None:
    task = {"solution": TwentyQuestionsEnv().candidates.objects[0]}
    factory = as_environment_factory(Secret())
    rows = prompt_dataset([task, task, {**task, "seed": 7}], instruction="Play.")
    games = [[factory().reset(**one) for _ in range(3)] for one in rows]  # TRL repeats each row in a row
    assert [len(set(group)) for group in games] == [1, 1, 1]
    assert len({group[0] for group in games}) == 3
    assert prompt_dataset([task], instruction="Play.")[0] == rows[0]
    assert factory().reset(task_data=task) == factory().reset(task_data=task)  # rows of one's own


def add(first: int, second: int = 2) -> int:
    """Add two numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first + second


def paint(color: Literal["red", "blue"]) -> str:
    """Paint it.

    Args:
        color: What with.
    """
    return f"It is {color} now."


def test_tools_keep_their_schemas_and_an_answer_is_a_tool_too() -> None:
    env = ToolEnv(tools=[add, paint])
    environment = as_environment_factory(env)()
    tools = tools_of(environment)
    assert list(tools) == ["add", "answer", "paint"]
    for name, original in (("add", add), ("paint", paint)):
        made, wanted = (get_json_schema(tool)["function"]["parameters"] for tool in (tools[name], original))
        assert made["required"] == wanted["required"]
        assert {key: value["type"] for key, value in made["properties"].items()} == {
            key: value["type"] for key, value in wanted["properties"].items()
        }
    assert get_json_schema(tools["paint"])["function"]["parameters"]["properties"]["color"]["enum"] == ["red", "blue"]
    assert "What is 3 + 4?" in environment.reset(**row(question="What is 3 + 4?", answer="7"))
    assert tools["add"](first=3, second=4) == "7"
    assert tools["paint"](color="red") == "It is red now."
    assert tools["answer"](action="7") == "The episode is over."
    assert environment.get_reward() == 1.0


class Served(ToolEnv):
    """Has a tool as a server of others describes it."""

    def __init__(self, description: str, arguments: dict[str, Any]) -> None:
        self.described = {"name": "look", "description": description, "parameters": {"properties": arguments}}
        super().__init__(tools=[add])

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": self.described}]


def schema_of(env: Any) -> dict[str, Any]:
    return get_json_schema(as_environment_factory(env)().look)["function"]


lines = st.lists(
    st.sampled_from(["Look at it.", "Args:", "  what: a thing", "where: there", "Returns:", ""]), max_size=5
)


@given(lines, lines)
def test_what_a_server_returns_of_a_tool_of_any_layout_is_one_schema(summary: list[str], argument: list[str]) -> None:
    arguments = {"what": {"type": "string", "description": "\n".join(argument)}, "where": {"type": "integer"}}
    schema = schema_of(Served("\n".join(summary), arguments))
    assert {name: one["type"] for name, one in schema["parameters"]["properties"].items()} == {
        "what": "string",
        "where": "integer",
    }
    assert schema["parameters"]["properties"]["where"]["description"] == "where"


def test_arguments_that_may_be_of_several_types_take_the_first_that_is_known() -> None:
    either: dict[str, Any] = {"anyOf": [{"type": "null"}, {"type": "integer"}]}
    schema = schema_of(Served("Look.", {"first": {"type": ["null", "number"]}, "second": either, "third": {}}))
    types = [one["type"] for one in schema["parameters"]["properties"].values()]
    assert types == ["number", "integer", "string"]


@pytest.mark.parametrize("argument", ["class", "self", "from-date"])
def test_an_argument_that_no_method_can_have_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"'look' has the argument '{argument}'"):
        as_environment_factory(Served("Look.", {argument: {"type": "string"}}))


def test_an_episode_that_the_model_leaves_is_rewarded_what_it_earned_so_far() -> None:
    env = ToolEnv(env_config={"call_reward": 0.25}, tools=[add])
    environment = as_environment_factory(env)()
    assert environment.get_reward() is None
    environment.reset(**row(question="What is 3 + 4?", answer="7"))
    environment.add(first=3)
    assert environment.get_reward() == 0.25
    assert not env.active_states  # and its session is closed


def test_a_failed_episode_has_no_reward() -> None:
    class Broken(TwentyQuestionsEnv):
        def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
            raise RuntimeError("the game is broken")

    environment = as_environment_factory(Broken())()
    environment.reset(**row(**dict(TwentyQuestionsEnv().get_train_dataset(size=1)[0]["task_data"])))
    assert environment.act(action="Is it alive?") == "The episode is over."
    assert environment.get_reward() is None


@pytest.mark.parametrize("name", ["reset", "get_reward", "_act", "look up"])
def test_a_name_that_no_tool_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a tool's name"):
        as_environment_factory(TwentyQuestionsEnv(), tool_name=name)


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="env must be a MultistepEnv"):
        as_environment_factory(TwentyQuestionsEnv)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"column 'task'.*prompt_dataset\(rows, instruction=...\)"):
        questions()().reset(prompt=[{"role": "user", "content": "Play."}])


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
