"""ToolEnv as a whole: how episodes end and what they give, classes of one's own, tasks, and other processes."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from tool_functions import Calls, add, call, divide, play, results

from agentsgym import ConfigError, EnvProcessPool, EnvThreadPool, ScriptedAgent, StopReason, TaskError, ToolCall, make
from agentsgym.credit.scored import ScoredRollout
from agentsgym.envs import PriceListEnv, SessionTools, ToolEnv, ToolResult, register_tools
from agentsgym.envs.Tools import tasks_from
from agentsgym.envs.Tools.process import Process
from agentsgym.envs.Tools.tasks import is_same, matches
from agentsgym.testing import chat_tokenizer
from agentsgym.training.metrics.rollouts import RolloutSummary, rollout_metrics

ADD = [call("add", a=3, b=4)]
PATH = "agentsgym.envs.Tools.ToolEnv"


def test_an_answer_without_a_call_ends_the_episode_and_is_judged() -> None:
    config = {"call_reward": 0.25, "failed_call_reward": -1.0, "wrong_answer_reward": -0.5}
    env = ToolEnv(env_config=config, tools=[add, divide])
    right = play(env, ADD, "<think>3 + 4</think> 7.", answer=7)
    assert (right.turn_rewards, right.info["success"]) == ([0.25, 1.0], True)
    wrong = play(env, [*ADD, call("divide", a=1, b=0)], "8", answer=[7, "seven"])
    assert (wrong.turn_rewards, wrong.info["success"]) == ([-0.75, -0.5], False)
    unknown = play(env, "whatever")
    assert (unknown.turn_rewards, unknown.success) == ([0.0], None)
    env.close()


def test_what_is_submitted_behind_a_call_beyond_the_budget_is_not_judged() -> None:
    env = ToolEnv(env_config={"submit_tool": "submit", "max_calls_per_episode": 1}, tools=add)
    late = play(env, ADD, [*ADD, call("submit", answer="7")], answer=7)
    assert (late.turn_rewards, late.info["success"], late.info["num_failed_calls"]) == ([0.0, 0.0], False, 2)
    before = play(env, ADD, [call("submit", answer="7"), *ADD], answer=7)
    assert (before.turn_rewards, before.info["success"]) == ([0.0, 1.0], True)


def test_a_call_that_cannot_be_read_is_rewarded_as_one_that_failed() -> None:
    config = {"call_reward": 0.25, "failed_call_reward": -1.0, "invalid_reward": -0.5, "error_allowance": 3}
    broken = ToolCall(name="", error="the call is not valid JSON")
    moves = [[*ADD, broken, broken], [*ADD, call("ad", a=1, b=2)], [broken], [call("ad", a=1, b=2)], "7"]
    trajectory = play(ToolEnv(env_config=config, tools=add), *moves)
    assert trajectory.turn_rewards == [-1.75, -0.75, -1.5, -1.5, 0.0]


BARE = json.dumps({"name": "add", "arguments": {"a": 3, "b": 4}})
UNCLOSED = '<tool_call>{"name": "add"'


@pytest.mark.parametrize("mode", ["tolerant", "strict"])
def test_repaired_and_unreadable_calls_are_counted(mode: str) -> None:
    env = Repaired(env_config={"tool_calls": mode, "error_allowance": 9}, tools=add)
    [rollout] = env.rollout([{"question": "3 + 4?"}], ScriptedAgent([BARE, UNCLOSED, BARE, "7"]))
    is_strict = mode == "strict"
    counts = {"unreadable": 3} if is_strict else {"bare": 2, "unreadable": 1}
    assert rollout.info["calls_read"] == counts
    assert rollout.info["num_repaired_calls"] == (0 if is_strict else 2)
    assert rollout.info["num_unreadable_calls"] == counts["unreadable"]
    assert rollout.turn_rewards == ([0.0] * 4 if is_strict else [0.5, 0.0, 0.5, 0.0])
    complaints = [one["content"] for one in rollout.messages if "a call looks like this" in one["content"]]
    assert len(complaints) == counts["unreadable"]
    named = rollout_metrics([RolloutSummary.of(rollout, [], ScoredRollout.from_trajectory(rollout, group=0))])
    shares = {"unreadable": 1.0, "repaired": 0.0} if is_strict else {"unreadable": 1 / 3, "repaired": 2 / 3}
    kinds = {} if is_strict else {"tools/repaired/bare": 2 / 3}
    shares |= {"call_frequency": 0 if is_strict else 2, "failure_frequency": 0}
    expected = {f"tools/{key}": one for key, one in shares.items()}
    assert {key: value for key, value in named.items() if key.startswith("tools/")} == expected | kinds


class Repaired(ToolEnv):
    """Rewards each repaired call."""

    def _reward_call(self, state: Any, call: ToolCall, result: ToolResult) -> float:
        return 0.5 if call.repair == "bare" else 0.0


class Meeting:
    """A session's object, two calls of which meet."""

    def __init__(self, task_data: dict[str, Any], rng: random.Random) -> None:
        self.meeting = threading.Barrier(2)

    def meet(self) -> str:
        """Wait for another call."""
        self.meeting.wait(20)  # breaks unless two calls are in here at once
        return "met"


@pytest.mark.parametrize("parallel_tools", ["all", ["meet"]])
def test_the_configuration_makes_the_tools_of_a_session_parallel_too(parallel_tools: Any) -> None:
    env = ToolEnv(env_config={"parallel_tools": parallel_tools}, tools=SessionTools(tools_class=Meeting))
    assert results(play(env, [call("meet"), call("meet")], "done")) == ["met", "met"]
    env.close()


def test_with_a_submit_tool_nothing_else_is_an_answer() -> None:
    env = ToolEnv(env_config={"submit_tool": "submit"}, tools=add)
    moves = [[*ADD, call("submit", answer="7"), call("add", a=1, b=1)]]
    trajectory = play(env, "7", *moves, answer=7)
    assert [turn.invalid for turn in trajectory.turns] == [True, False]
    assert trajectory.messages[2]["content"] == "To answer, call submit."
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DONE, 1.0)
    assert trajectory.info["num_calls"] == 1
    assert trajectory.info["success"] is True


def test_an_episode_ends_where_its_turns_are_spent() -> None:
    trajectory = play(ToolEnv(env_config={"max_steps_per_episode": 3}, tools=add), ADD, answer=7)
    assert (trajectory.stop_reason, trajectory.num_turns, trajectory.final_reward) == (StopReason.MAX_TURNS, 3, 0.0)
    assert trajectory.info["success"] is False


def test_text_that_holds_calls_is_read_and_agents_are_notified_of_the_tools() -> None:
    agent = Calls('<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>', "7")
    [trajectory] = ToolEnv(tools=add).rollout([{"question": "3 + 4?", "answer": 7}], agent)
    assert results(trajectory) == ["7"]
    assert [schema["function"]["name"] for schema in agent.tools] == ["add"]
    env = ToolEnv(tools=add)
    state = env.start_session("s", {"question": "?"}, 0)
    next_state, _, done, _ = env._step_episode("s", state, agent.moves[0])
    assert (next_state["pending"][0]["content"], done) == ("7", False)


class Stairs(ToolEnv):
    """A class of one's own: a state, a game behind a tool, answers that do not end it."""

    def _tools(self) -> list[Any]:
        return [{"name": "climb", "parameters": {"properties": {"steps": {"type": "integer"}}}}]

    def _check_task(self, task_data: Any) -> None:
        pass

    def _question(self, state: dict[str, Any]) -> str:
        return f"Climb {state['task']['height']} steps."

    def _call_tool(self, session_id: str, state: dict[str, Any], call: ToolCall) -> ToolResult:
        if call.arguments["steps"] < 0:
            raise ValueError("upwards only")
        is_top = call.arguments["steps"] >= state["task"]["height"]
        return ToolResult(content="top" if is_top else "on the way", done=is_top, success=is_top)

    def _reward_call(self, state: dict[str, Any], call: ToolCall, result: ToolResult) -> float:
        return -1.0 if result.failed else call.arguments["steps"] / 10

    def _answer(self, session_id: str, state: dict[str, Any], text: str) -> tuple[float, bool, dict[str, Any]]:
        return 0.0, False, {"success": False, "reply": "Climb, do not talk."}


def test_a_class_of_ones_own_decides_what_calls_and_answers_do() -> None:
    env = Stairs()
    moves = [call("climb", steps=-1)], "Am I there?", [call("climb", steps=2)], [call("climb", steps=5)]
    [trajectory] = env.rollout([{"height": 5}], Calls(*moves))
    assert [message["content"] for message in trajectory.messages if message["role"] != "assistant"] == [
        "Climb 5 steps.",
        "Error: upwards only (ValueError)",
        "Climb, do not talk.",
        "on the way",
    ]
    assert trajectory.turn_rewards == [-1.0, 0.0, 0.2, 0.5]
    assert trajectory.success is True


class Nonsense(Stairs):
    def _call_tool(self, session_id: str, state: dict[str, Any], call: ToolCall) -> Any:
        return "a text"


def test_a_hook_that_returns_no_result_and_a_schema_without_a_hook_are_named() -> None:
    [trajectory] = Nonsense().rollout([{"height": 5}], Calls([call("climb", steps=2)]))
    assert "_call_tool must return a ToolResult, got 'a text'" in str(trajectory.error)

    class Bare(ToolEnv):
        def _tools(self) -> list[Any]:
            return [{"name": "climb"}]

    with pytest.raises(ConfigError, match="only a schema for the tool 'climb'"):
        play(Bare(), "7")


def test_an_answer_behind_the_call_that_ended_the_task_does_not_count() -> None:
    def finish() -> ToolResult:
        """End the task."""
        return ToolResult(content="over", reward=-1.0, done=True, success=False)

    env = ToolEnv(env_config={"submit_tool": "submit"}, tools=[finish, add])
    submit = call("submit", answer="7")
    late = play(env, [call("finish"), *ADD, submit], answer=7)
    assert (late.turn_rewards, late.success, late.num_turns) == ([-1.0], False, 1)
    assert late.info["num_failed_calls"] == 2
    early = play(env, [*ADD, submit, call("finish")], answer=7)
    assert (early.turn_rewards, early.success) == ([1.0], True)
    env.close()


class Counting:
    """Counts the calls of one episode."""

    def __init__(self, task_data: dict[str, Any], rng: Any) -> None:
        self.count = 0

    def tick(self) -> int:
        """Count."""
        self.count += 1
        return self.count


@pytest.mark.parametrize("tools", [[add], add, [add, SessionTools(tools_class=Counting)], {"name": "add"}, None, []])
def test_tools_may_come_from_the_class(tools: Any) -> None:
    class Adds(ToolEnv):
        def _tools(self) -> Any:
            return tools

    env = Adds()
    if tools in ({"name": "add"}, None, []):
        with pytest.raises(ConfigError, match=r"^Adds has (no tools|only a schema for the tool 'add')"):
            play(env, "7")
        return
    assert results(play(env, ADD, "7")) == ["7"]
    if len(env.tool_schemas) == 2:
        assert results(play(env, [call("tick")], [call("tick"), *ADD], "7")) == ["1", "2", "7"]


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (Counting, r"got <class .*Counting'>: write SessionTools\(tools_class=Counting\)$"),
        ([add, "add"], "got 'add'$"),
        (3, "got 3$"),
    ],
)
def test_a_class_whose_tools_are_none_is_refused_with_what_they_may_be(tools: Any, problem: str) -> None:
    class Adds(ToolEnv):
        def _tools(self) -> Any:
            return tools

    with pytest.raises(ConfigError, match=r"^Adds\._tools\(\) must return .* SessionTools and McpServer, " + problem):
        play(Adds(), "7")


def test_the_question_and_the_answer_stay_known_beside_a_class_s_own_fields() -> None:
    class Shop(ToolEnv):
        task_fields = ("stock",)

    class Bakery(Shop):
        task_fields = ("bread", "question")

    assert set(Shop.task_fields) == {"stock", "question", "answer"}
    assert play(Shop(tools=add), "7", answer=7).success
    assert sorted(Bakery.task_fields) == ["answer", "bread", "question"]
    with pytest.raises(TaskError, match=r"\['stocks'\] is unknown; did you mean 'stock'"):
        Shop(tools=add).check_task({"question": "What?", "stocks": {}})
    assert "question" not in PriceListEnv.task_fields


@given(st.text(max_size=6))
def test_an_answer_is_always_the_same_as_itself(text: str) -> None:
    assert is_same(text, text)


@given(st.integers(-(10**6), 10**6))
def test_numbers_are_compared_by_value(number: int) -> None:
    for text in (f"{number}", f" {number:,} ", f"{number}.0", f"**{number}**", f"$ {number}."):
        assert is_same(text, number), text
    assert not is_same(str(number + 1), number)


@given(st.integers(-(10**40), 10**40), st.integers(1, 9))
def test_whole_numbers_are_compared_to_the_last_digit(number: int, more: int) -> None:
    assert is_same(f"{number:,}", number)
    assert is_same(f"{number:,}".replace("-", "\u2212"), str(number))
    assert not is_same(str(number + more), number)


@given(st.floats(-1e300, 1e300))
def test_a_float_is_its_own_digits(number: float) -> None:
    assert is_same(repr(number), number)
    assert not number.is_integer() or is_same(str(int(number)), number)


@pytest.mark.parametrize(
    ("text", "expected", "how", "is_right"),
    [
        ("9007199254740992", 9007199254740993, "normalized", False),
        ("51090942171709440001", "51090942171709440000", "normalized", False),
        ("\u22125", -5, "normalized", True),
        ("3/4", 0.75, "normalized", True),
        ("The  Cat.", "the cat", "normalized", True),
        ("The Cat", "the cat", "exact", False),
        (" the cat\n", "the cat", "exact", True),
        ("seven", [7, "Seven"], "normalized", True),
        ("", "", "normalized", True),
        ("...", "x", "normalized", False),
        ("1 2", 12, "normalized", False),
        ("1e400", 7, "normalized", False),
        ("1e400", "1e500", "normalized", False),
        ("5", ".5", "normalized", False),
        (".5", 0.5, "normalized", True),
        ("$.50", "0.50", "normalized", True),
        ("1000000001", 1000000000, "normalized", False),
        ("0.3333333333", 1 / 3, "normalized", True),
        ("C", "C#", "normalized", False),
        ("c#.", "C#", "normalized", True),
    ],
)
def test_answers_are_compared(text: str, expected: Any, how: str, is_right: bool) -> None:
    assert matches(text, expected, how) is is_right


def test_tasks_come_from_any_table(tmp_path: Path) -> None:
    rows = [{"prompt": "3 + 4?", "gold": 7, "level": 1}, {"prompt": "1 + 1?", "gold": 2, "level": 2}]
    columns = {"question": "prompt", "answer": "gold", "difficulty": "level"}
    tasks = tasks_from(rows, columns)
    assert tasks == [
        {"question": "3 + 4?", "answer": 7, "difficulty": 1},
        {"question": "1 + 1?", "answer": 2, "difficulty": 2},
    ]
    assert tasks_from(Dataset.from_list(rows), columns) == tasks
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert tasks_from(str(file), columns) == tasks
    register_tools("test add", add)
    options: Any = {"data": rows, "columns": columns}
    dataset = ToolEnv.get_train_dataset({"tools": "test add"}, **options, split="all")
    env = make(dataset[0])
    assert isinstance(env, ToolEnv)
    played = env.rollout(dataset, Calls(ADD, "7"))
    requested = [row["task_data"]["question"] for row in dataset]
    assert sorted(zip(requested, [one.final_reward for one in played], strict=True)) == [
        ("1 + 1?", 0.0),
        ("3 + 4?", 1.0),
    ]
    assert dataset[0]["env_class_path"] == PATH


class Planned(ToolEnv):
    """A class that declares a key of its tasks."""

    task_fields = ("plan",)

    def _tools(self) -> list[Any]:
        return [add]


@pytest.mark.parametrize("rows", [list, Dataset.from_list])
@pytest.mark.parametrize(
    ("env_class", "kept", "left_out"),
    [(ToolEnv, {"question", "answer", "plan", "note"}, ""), (Planned, {"question", "answer", "plan"}, "'note'")],
)
def test_without_columns_the_declared_ones_reach_the_task_and_the_others_are_logged(
    rows: Any, env_class: Any, kept: set[str], left_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = rows([{"answer": n, "question": f"{n}?", "plan": "pro", "note": None} for n in range(3)])
    dataset = env_class.get_train_dataset({}, data=table, split="all")
    assert all(row["task_data"].keys() == kept | {"seed"} for row in dataset)
    assert {row["task_data"]["plan"] for row in dataset} == {"pro"}
    assert [record.getMessage() for record in caplog.records] == (
        [f"the columns {left_out} are left out: they are not in task_fields"] if left_out else []
    )


def test_answers_are_optional(caplog: pytest.LogCaptureFixture) -> None:
    [row] = ToolEnv.get_train_dataset({}, data=[{"question": "?"}], split="all")
    assert row["task_data"].keys() == {"question", "seed"}
    assert "no column 'answer', so answers are not compared" in caplog.text
    [one] = ToolEnv(tools=add).rollout([row["task_data"]], Calls("7"))
    assert (one.success, one.failed) == (None, False)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("x.csv", "question,answer\n1?,1\n", "'path': 'csv'"),
        ("x.json", '[{"question": "?"}]', "'path': 'json'"),
        ("x.json", '[\n{"question": "?"}]', "'path': 'json'"),
        ("x.jsonl", "question", "must be a JSON object: Expecting value: line 1 column 1 (char 0)$"),
    ],
)
def test_a_table_in_another_format_is_refused_with_the_way_to_load_it(
    tmp_path: Path, name: str, text: str, hint: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(hint).replace(re.escape("$"), "$")):
        ToolEnv.get_train_dataset({}, data=str(tmp_path / name))


def test_training_and_evaluation_share_no_question_and_no_seed() -> None:
    rows = [{"question": f"{n} + {n % 7}?", "answer": n + n % 7} for n in range(20)] * 2
    train, other = (make_rows({}, data=rows) for make_rows in (ToolEnv.get_train_dataset, ToolEnv.get_eval_dataset))
    assert (len(train), len(other)) == (32, 8)
    for key in ("question", "seed"):
        assert not {row["task_data"][key] for row in train} & {row["task_data"][key] for row in other}
    assert len(ToolEnv.get_eval_dataset({}, data=rows, size=100)) == 100


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        (None, None, "has no built-in tasks: pass data="),
        ([{"prompt": "?"}], None, r"data\[0\] has no column 'question'"),
        (Dataset.from_list([{"questions": "?", "answer": 1}]), None, "did you mean 'questions'"),
        ([{"question": "?"}], {"question": "question", "answer": "answer"}, r"data\[0\] has no column 'answer'"),
        (
            DatasetDict(train=Dataset.from_list([{"question": "?"}])),
            None,
            "has several splits|the path to a JSONL file",
        ),
        ("gsm8k", None, "cannot be read from 'gsm8k'"),
        ([{"question": "?", "answer": 1}], {"answer": "answer"}, "must name the column of the 'question'"),
        ([3], None, r"data\[0\] must be a dict"),
        ([], None, "at least one row"),
        ([{"question": "?", "answer": {1, 2}}, {"question": "!", "answer": 1}], None, "must be plain JSON"),
    ],
)
def test_a_table_that_has_no_tasks_is_refused(data: Any, columns: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToolEnv.get_train_dataset({}, data=data, columns=columns, split="all")


def test_a_misspelled_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'data'"):
        ToolEnv.get_train_dataset({}, dat=[])


@pytest.mark.parametrize("task", [{}, {"question": ""}, {"question": 3}, {"question": "?", "answer": {"a": 1}}])
def test_a_task_that_is_none_is_refused(task: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="task_data"):
        ToolEnv(tools=add).rollout([task], Calls("7"))


def test_other_names_for_the_same_tools_are_refused() -> None:
    register_tools("test twice", [add])
    register_tools("test twice", [add])
    with pytest.raises(ConfigError, match="other tools are already registered as 'test twice'"):
        register_tools("test twice", [divide])


def test_it_goes_to_threads_and_processes_and_copies_play_alike() -> None:
    env = ToolEnv(env_config={"tool_timeout_s": 20.0}, tools=add)
    tasks = [{"question": "3 + 4?", "answer": 7}] * 4
    expected = [trajectory.messages for trajectory in env.rollout(tasks, Calls(ADD, "7"))]
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert [one.messages for one in other.rollout(tasks, Calls(ADD, "7"))] == expected
    for pool in (EnvThreadPool(2), EnvProcessPool(1)):
        agent = Calls(ADD, "7")
        with pool:
            played = env.rollout(tasks, agent, pool=pool)
        assert [schema["function"]["name"] for schema in agent.tools] == ["add"]
        assert [(one.error, one.messages) for one in played] == [(None, messages) for messages in expected]
    env.close()


def test_an_episode_with_tools_is_recorded_with_a_tokenizer() -> None:
    env = ToolEnv(chat_tokenizer(), tools=add)
    text = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    [trajectory] = env.rollout([{"question": "3 + 4?", "answer": 7}], Calls(text, "7"))
    assert results(trajectory) == ["7"]
    assert trajectory.num_turns == 2
    assert sum(trajectory.agent_token_mask) > 0
    assert trajectory.final_reward == 1.0


def test_threads_that_use_an_environment_first_share_what_the_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    both_make_one = threading.Barrier(2)

    class Slow(Process):
        def __init__(self, *arguments: Any) -> None:
            both_make_one.wait(20)
            super().__init__(*arguments)

    monkeypatch.setattr("agentsgym.envs.Tools.env.Process", Slow)
    env = ToolEnv(tools=add)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: env._process, range(2))
    assert one is other
    env.close()


@pytest.mark.parametrize("answer", [[], {}, [None], [[7]]])
def test_an_answer_that_can_never_be_right_is_refused(answer: Any) -> None:
    with pytest.raises(TaskError, match="must be a string, a number or a list of these"):
        ToolEnv(tools=add).check_task({"question": "What?", "answer": answer})


def test_an_object_that_is_not_made_or_closed_in_time_fails_its_episode_alone() -> None:
    gate, closed = threading.Event(), threading.Semaphore(0)

    class Slow:
        def __init__(self, task_data: dict[str, Any], generator: random.Random) -> None:
            if task_data["is_slow"]:
                gate.wait(20)

        def look(self) -> str:
            """Look."""
            return "seen"

        def close(self) -> None:
            closed.release()

    env = ToolEnv(env_config={"setup_timeout_s": 0.2}, tools=SessionTools(tools_class=Slow))
    tasks = [{"question": "What?", "is_slow": True}, {"question": "What?", "is_slow": False}]
    slow, quick = env.rollout(tasks, Calls([call("look")], "done"))
    assert "creating Slow took longer than env_config['setup_timeout_s'] = 0.2" in str(slow.error)
    assert results(quick) == ["seen"]
    gate.set()  # what is made too late is closed
    assert closed.acquire(timeout=20)
    assert closed.acquire(timeout=20)
    env.close()
