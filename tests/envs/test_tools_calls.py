"""Calls of tools: their order, what goes wrong with them, limits of time, length and number."""

from __future__ import annotations

import enum
import itertools
import random
import threading
import time
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_functions import Calls, Gate, add, call, divide, play, results
from transformers import cache_utils

from agentsgym import ConfigError, EnvError, TaskError
from agentsgym.envs.shared import timed as runner_module
from agentsgym.envs.Tools import SessionTools, ToolEnv, ToolResult, parallel
from agentsgym.types import Action, StopReason, ToolCall

BROKEN = ToolCall(name="", error="the call is not valid JSON")


def tool(name: str, function: Any) -> Any:
    """A function without arguments that can be a tool."""

    def made() -> Any:
        """Do it."""
        return function()

    made.__name__ = name
    return made


def env_of(*tools: Any, **config: Any) -> ToolEnv:
    return ToolEnv(env_config=config, tools=list(tools))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=8), st.booleans(), st.booleans()
)
def test_results_come_in_call_order_with_the_ids_of_their_calls(
    pairs: list[tuple[int, int]], is_parallel: bool, is_timed: bool
) -> None:
    config = {"parallel_tools": "all" if is_parallel else [], "tool_timeout_s": 20.0 if is_timed else None}
    env = env_of(add, **config)
    trajectory = play(env, [call("add", id=f"id{n}", a=a, b=b) for n, (a, b) in enumerate(pairs)], "done")
    answers = [message for message in trajectory.messages if message["role"] == "tool"]
    assert [message["content"] for message in answers] == [str(a + b) for a, b in pairs]
    assert [message.get("tool_call_id") for message in answers] == [f"id{n}" for n in range(len(pairs))]
    assert {message.get("name") for message in answers} == {"add"}
    assert trajectory.info["num_calls"] == len(pairs)
    env.close()


def test_tools_that_are_marked_run_side_by_side_and_the_others_alone() -> None:
    meeting, inside, most = threading.Barrier(2), [], []

    def meet() -> str:
        """Wait for another call."""
        meeting.wait(20)  # breaks unless two calls are in here at once
        return "met"

    def alone() -> str:
        """Note who else is here."""
        inside.append(1)
        most.append(len(inside))
        inside.pop()
        return "alone"

    env = env_of(parallel(meet), alone)
    trajectory = play(env, [call("meet"), call("meet"), call("alone"), call("alone")], "done")
    assert results(trajectory) == ["met", "met", "alone", "alone"]
    assert most == [1, 1]
    env.close()


def test_what_a_tool_raises_is_its_result_and_marks_the_turn() -> None:
    trajectory = play(env_of(divide), [call("divide", a=1, b=0)], [call("divide", a=4, b=2)], "done")
    assert results(trajectory) == ["Error: division by zero (ZeroDivisionError)", "2.0"]
    assert not trajectory.failed
    assert (trajectory.info["num_calls"], trajectory.info["num_failed_calls"]) == (2, 1)
    assert trajectory.turns[0].invalid is False


@pytest.mark.parametrize(
    "error",
    [
        *(SystemExit(3), GeneratorExit(), RecursionError(), BaseException("odd"), MemoryError()),
        *(StopIteration(), StopAsyncIteration()),
    ],
)
def test_whatever_a_tool_raises_ends_no_run(error: BaseException) -> None:
    def fail() -> None:
        raise error

    for limit_s in (None, 20.0):
        trajectory = play(env_of(tool("fail", fail), tool_timeout_s=limit_s), [call("fail")], "done")
        assert results(trajectory)[0].startswith("Error: ")
        assert trajectory.stop_reason is StopReason.DONE


def test_the_first_traceback_of_each_tool_and_type_is_logged_and_all_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> str:
        raise caught.pop()

    caught: list[Exception] = [KeyError("b"), NameError("c"), NameError("b"), NameError("a")]
    env = env_of(tool("broken", broken), tool("good", lambda: "fine"), divide)
    moves = [*[[call("broken")]] * 4, [call("good"), call("divide", a=1)], "done"]
    trajectory = play(env, *moves)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(" (")[0] for text in texts] == [
        "the tool 'broken' raised NameError: a",
        "the tool 'broken' raised KeyError: 'b'",
    ]
    assert all("raise caught.pop()" in text for text in texts)
    assert (trajectory.metrics["num_raised_calls"], trajectory.metrics["num_failed_calls"]) == (4, 5)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ({"reward": "1"}, "the tool odd's reward must be a finite number, got '1'"),
        ({"reward": {"a": None}}, "the tool odd's reward['a'] must be a finite number, got None"),
        ({"done": 0.5}, "the tool odd's done must be True or False, got 0.5"),
        ({"success": 0.2}, "must be True or False, got 0.2"),
        ({"failed": "no"}, "must be True or False, got 'no'"),
    ],
)
def test_a_result_of_the_wrong_type_fails_its_episode_with_the_tool_named(flag: Any, sentence: str) -> None:
    def odd() -> ToolResult:
        return ToolResult(content="fine", **flag)

    trajectory = play(env_of(tool("odd", odd)), [call("odd")], "done")
    assert trajectory.failed
    assert sentence in (trajectory.error or "")


def test_an_async_generator_is_no_tool() -> None:
    async def stream() -> Any:
        """Stream."""
        yield 1

    class Streams:
        async def stream(self) -> Any:
            """Stream."""
            yield 1

    for tools in (stream, SessionTools(Streams)):
        with pytest.raises(ConfigError, match="'stream' is an async generator: return the result"):
            ToolEnv(tools=tools)


class Needs:
    """A class whose constructor names keys of the task."""

    def __init__(self, stock: dict[str, int], note: str, rng: random.Random, limit: int = 3, *, other: int = 7) -> None:
        self.seen = [stock, limit, other, rng.randint(1, 9)]

    def look(self) -> list[Any]:
        """Look."""
        return self.seen


class Bare:
    """A class without a constructor."""

    def look(self) -> str:
        """Look."""
        return "bare"


def test_a_constructor_gets_the_keys_of_the_task_that_it_names() -> None:
    env = ToolEnv(tools=SessionTools(Needs))
    [seen] = results(play(env, [call("look")], "done", stock={"eggs": 2}, note="", other=1, seed=5))
    assert seen.startswith('[{"eggs": 2}, 3, 1, ')
    assert results(play(ToolEnv(tools=SessionTools(Bare)), [call("look")], "done")) == ["bare"]
    with pytest.raises(TaskError, match=r"constructor of Needs requires 'stock'.* the task has \['question'\]"):
        env.rollout([{"question": "?"}], Calls("7"))


def test_a_tool_may_fail_its_episode_by_an_env_error() -> None:
    def fail() -> None:
        raise EnvError("the sandbox is gone")

    trajectory = play(env_of(tool("fail", fail)), [call("fail")], "done")
    assert trajectory.failed
    assert "the sandbox is gone" in str(trajectory.error)


class Picture:
    """An image, as image libraries print it."""

    def __repr__(self) -> str:
        return f"<Picture mode=RGB size=2x2 at 0x{id(self):X}>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ({"price": 3, "sizes": (1, 2)}, '{"price": 3, "sizes": [1, 2]}'),
        ("é\n", "é\n"),
        ("\ud800", "\\ud800"),
        ({1, 2}, '"{1, 2}"'),
        (b"ok", "\"b'ok'\""),
        (b"\x89PNG", '"[a value of type bytes, which cannot be shown as text]"'),
        ([Picture(), "a cat"], '["[a value of type Picture, which cannot be shown as text]", "a cat"]'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (float("nan"), "NaN"),
        (True, "true"),
        (ToolResult(content="as it is"), "as it is"),
    ],
)
def test_a_tool_may_return_anything(value: Any, text: str) -> None:
    trajectory = play(env_of(tool("give", lambda: value)), [call("give")], "done")
    assert results(trajectory) == [text]
    assert not trajectory.failed


def test_a_circle_is_shown_and_ten_megabytes_are_cut_with_a_sentence() -> None:
    circle: list[Any] = []
    circle.append(circle)
    env = env_of(tool("circle", lambda: circle), tool("much", lambda: "x" * 10_000_000), max_result_length=100)
    shown, much = results(play(env, [call("circle"), call("much")], "done"))
    assert "…" in shown
    assert much == "x" * 100 + "\n[cut: the first 100 of 10000000 characters]"


def test_a_tool_that_hangs_is_cut_off_and_the_next_call_does_not_wait_for_it() -> None:
    gate = Gate()
    env = env_of(gate.wait, add, tool_timeout_s=0.1)
    trajectory = play(env, [call("wait"), call("add", a=1, b=2)], [call("wait"), call("wait")], "done")
    late = "Error: wait took longer than 0.1 s, and was given up"
    assert results(trajectory) == [late, "3", late, late]
    assert gate.num_inside == 3
    gate.opened.set()
    env.close()


def test_parallel_calls_that_hang_share_their_limit_of_time() -> None:
    gate = Gate()
    env = env_of(gate.wait, tool_timeout_s=0.4, parallel_tools=["wait"])
    start = time.monotonic()
    trajectory = play(env, [call("wait")] * 8, "done")
    assert time.monotonic() - start < 8 * 0.4
    assert len(results(trajectory)) == 8
    gate.opened.set()
    env.close()


def test_too_many_calls_that_never_return_fail_the_episode_until_some_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_ABANDONED", 2)
    gate = Gate()
    env = env_of(gate.wait, tool_timeout_s=0.05)
    trajectory = play(env, [call("wait")] * 2, [call("wait")], "done")
    assert trajectory.failed
    assert "tool calls exceeded env_config['tool_timeout_s']" in str(trajectory.error)
    gate.opened.set()
    assert all(one.exception(20) is None for one in env._process.runner._abandoned)
    assert results(play(env, [call("wait")], "done")) == ['"open"']
    env.close()


def test_a_call_that_is_refused_costs_no_idle_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_ABANDONED", 1)
    runner, opened = runner_module.Runner("calls", "limit_s"), threading.Event()
    stuck = runner.start(opened.wait)
    assert runner.finish(runner.start(threading.current_thread), 20).daemon
    with pytest.raises(runner_module.CallTimeoutError):
        runner.finish(stuck, 0.01)
    while not runner._idle:
        time.sleep(0.001)
    for _ in range(2):
        with pytest.raises(EnvError, match="calls exceeded limit_s"):
            runner.start(opened.wait)
    assert len(runner._idle) == 1
    opened.set()
    runner.close()


def test_a_call_that_does_not_fit_its_schema_is_answered_and_the_next_one_is_made() -> None:
    bad = [call("ad", a=1, b=2), call("add", a=1), call("add", a=1, b="2"), call("add", a=1, b=2, c=3)]
    trajectory = play(env_of(add), [*bad, call("add", a=3, b=4)], "7", answer=7)
    unknown, missing, mistyped, unexpected, right = results(trajectory)
    assert unknown == "Error: there is no tool 'ad'; did you mean 'add'?"
    assert "'b' of 'add' is missing" in missing
    assert "must be an integer, got '2'" in mistyped
    assert "has no argument 'c'" in unexpected
    assert right == "7"
    assert trajectory.info["success"] is True
    assert (trajectory.info["num_calls"], trajectory.info["num_failed_calls"]) == (1, 4)


def test_a_malformed_call_costs_its_good_neighbors_nothing() -> None:
    trajectory = play(env_of(add), [BROKEN, call("add", a=3, b=4)], "7", answer=7)
    assert results(trajectory) == ["7\nA call could not be read: the call is not valid JSON"]
    assert trajectory.info["num_unreadable_calls"] == 1
    assert not any(turn.invalid for turn in trajectory.turns)


def test_the_same_complaint_of_many_calls_is_made_once_and_is_no_longer_than_a_result() -> None:
    other = ToolCall(name="", error="the call has no name")
    trajectory = play(env_of(add), [BROKEN] * 127 + [call("add", a=3, b=4), other], "7")
    assert results(trajectory) == [
        "7\n127 calls could not be read: the call is not valid JSON\nA call could not be read: the call has no name"
    ]
    assert trajectory.info["num_unreadable_calls"] == 128
    trajectory = play(env_of(add, max_result_length=30), [BROKEN, other, call("add", a=3, b=4)], "7")
    assert results(trajectory) == ["7\nA call could not be read: the \n[cut: the first 30 of 99 characters]"]


@pytest.mark.parametrize("moves", [[BROKEN], [call("ad", a=1, b=2)], [call("add", a=1)]])
def test_a_turn_without_any_good_call_is_invalid_and_names_what_was_wrong(moves: list[ToolCall]) -> None:
    trajectory = play(env_of(add, invalid_reward=-0.5), moves, "7", answer=7)
    assert [turn.invalid for turn in trajectory.turns] == [True, False]
    assert trajectory.turn_rewards == [-0.5, 1.0]
    output = trajectory.messages[2]["content"]
    assert any(part in output for part in ("not valid JSON", "there is no tool", "is missing"))
    again = play(env_of(add, error_allowance=1), moves, moves, "7")
    assert again.stop_reason is StopReason.INVALID


@pytest.mark.parametrize("calls", [(), (call("add", a=3, b=4),)])
def test_nothing_of_a_turn_that_was_cut_off_is_done(calls: tuple[ToolCall, ...]) -> None:
    cut = Action(text="The answer is 7", tool_calls=calls, finish_reason="length")
    trajectory = play(env_of(add), cut, "7", answer=7)
    assert trajectory.info["num_calls"] == 0
    assert "cut off by the limit" in trajectory.messages[2]["content"]
    assert [turn.invalid for turn in trajectory.turns] == [True, False]


def test_a_turn_and_an_episode_may_have_so_many_calls() -> None:
    three = [call("add", a=n, b=0) for n in range(3)]
    trajectory = play(env_of(add, max_calls_per_turn=2), three, "done")
    assert results(trajectory) == ["0", "1", "Error: not made, since a turn may have 2 calls"]
    spent = play(env_of(add, max_calls_per_episode=4), three, three, "7", answer=7)
    assert spent.stop_reason is StopReason.DONE
    assert (spent.info["success"], spent.info["num_calls"], spent.num_turns) == (False, 4, 2)
    exact = play(env_of(add, max_calls_per_episode=3), three, "7", answer=7)
    assert exact.info["success"] is True


def test_a_call_that_ends_the_episode_is_rewarded_and_later_ones_are_not_made() -> None:
    end = ToolResult(content="bought", reward=2.0, done=True, success=True)
    count: list[int] = []
    env = env_of(tool("buy", lambda: end), tool("count", lambda: count.append(1)), call_reward=0.25)
    trajectory = play(env, [call("count"), call("buy"), call("count")], "never said")
    assert (trajectory.stop_reason, trajectory.num_turns) == (StopReason.DONE, 1)
    assert trajectory.info["success"] is True
    assert trajectory.final_reward == 2.5
    assert len(count) == 1


def test_what_json_cannot_write_reads_the_same_in_every_play() -> None:
    env = env_of(tool("count", lambda: (n for n in range(3))), tool("thing", object), tool("endless", itertools.count))
    counted, thing, endless = results(play(env, [call("count"), call("thing"), call("endless")], "done"))
    assert counted == "[0, 1, 2]"
    assert thing == '"[a value of type object, which cannot be shown as text]"'
    assert endless.endswith(", 998, 999]")
    env.close()


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def paint(color: Color, place: tuple[int, int], others: list[Color] | None = None) -> str:
    """Paint.

    Args:
        color: The color.
        place: The place.
        others: Other colors.
    """
    return f"{color.name} {place} {[other.name for other in others or ()]}"


class Painter:
    """Methods of every kind."""

    def __init__(self, task_data: dict[str, Any], generator: random.Random) -> None: ...

    @classmethod
    def make(cls) -> Any: ...

    @staticmethod
    def mix(one: Color, other: Color) -> str:
        """Mix.

        Args:
            one: A color.
            other: A color.
        """
        return f"{one.name} and {other.name}"


@pytest.mark.skipif(not hasattr(cache_utils, "DummyLayer"), reason="transformers before 5.23 refuses enums")
def test_a_tool_is_given_what_its_hints_state() -> None:
    env = env_of(paint, SessionTools(tools_class=Painter))
    moves = [
        call("paint", color="red", place=[1, 2], others=["blue"]),
        call("paint", color="blue", place=[3, 4]),
        call("paint", color="green", place=[3, 4]),
        call("mix", one="red", other="blue"),
        call("paint", color="red", place=[1, 2, 3]),
        call("paint", color="red", place=[1]),
        call("paint", color="red", place=[1, "2"]),
    ]
    first, second, wrong, mixed, *misplaced = results(play(env, moves, "done"))
    assert misplaced == [
        "Error: the argument 'place' of 'paint' must be a list of 2 items, got [1, 2, 3]",
        "Error: the argument 'place' of 'paint' must be a list of 2 items, got [1]",
        "Error: the argument 'place[1]' of 'paint' must be an integer, got '2'",
    ]
    assert (first, second, mixed) == ("RED (1, 2) ['BLUE']", "BLUE (3, 4) []", "RED and BLUE")
    assert "must be one of 'red', 'blue'" in wrong
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["paint", "mix"]
    env.close()


class Counter:
    """A tool with a state."""

    closed: ClassVar[list[int]] = []

    def __init__(self, task_data: dict[str, Any], generator: random.Random) -> None:
        self.count = task_data.get("start", 0)
        self.step = generator.randint(1, 9)

    def more(self) -> int:
        """Count on."""
        self.count += self.step
        return self.count

    async def later(self, by: int) -> int:
        """Count on, some time.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    def close(self) -> None:
        self.closed.append(self.count)

    def _hidden(self) -> None: ...


def test_each_session_has_an_object_of_its_own_that_the_task_resets() -> None:
    env = ToolEnv(tools=SessionTools(tools_class=Counter))
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["more", "later"]
    Counter.closed.clear()
    tasks = [{"question": "?", "seed": 5}, {"question": "?", "seed": 5, "start": 100}, {"question": "?", "seed": 6}]
    agent = Calls([call("more")], [call("more"), call("later", by=1000)], "done")
    one, other, third = env.rollout(tasks, agent)
    first = [int(text) for text in results(one)]
    assert [int(text) - 100 for text in results(other)] == first
    assert first[1] == 2 * first[0]
    assert first[2] == first[1] + 1000
    assert len(Counter.closed) == 3
    assert env._process._sessions == {}
    assert not third.failed


def test_a_session_object_that_still_runs_an_earlier_call_takes_no_other() -> None:
    gate = Gate()

    class Slow:
        def __init__(self, *_: Any) -> None: ...

        def wait(self) -> str:
            """Wait."""
            return gate.wait()

        def quick(self) -> str:
            """Be quick."""
            return "quick"

    env = ToolEnv(env_config={"tool_timeout_s": 0.1}, tools=SessionTools(tools_class=Slow))
    trajectory = play(env, [call("quick"), call("wait"), call("quick")], "done")
    assert results(trajectory)[0] == "quick"
    assert "was given up" in results(trajectory)[1]
    assert "an earlier call is still running" in results(trajectory)[2]
    gate.opened.set()
    env.close()


@pytest.mark.parametrize(
    ("tools", "config", "message"),
    [
        ([], {}, "has no tools"),
        ("add", {}, "accepts a function, SessionTools or McpServer"),
        ([Counter], {}, r"write SessionTools\(tools_class=Counter\)"),
        ([add, add], {}, "two tools of ToolEnv are called 'add'"),
        ([lambda a: a], {}, "no JSON schema can be created"),
        ([add], {"parallel_tools": ["ad"]}, "did you mean 'add'"),
        ([add], {"tool_timeout_s": 0}, "tool_timeout_s"),
        ([], {"tools": [add]}, r"to the constructor, as in ToolEnv\(tools=\[add\]\)\), got"),
        ([add], {"submit_tool": "add"}, "two tools of ToolEnv are called 'add'"),
    ],
)
def test_tools_that_cannot_be_are_refused(tools: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        play(ToolEnv(env_config=config, tools=tools), "7")


def test_a_class_without_methods_gives_no_tools() -> None:
    class Empty:
        pass

    with pytest.raises(ConfigError, match="Empty has no public method"):
        SessionTools(tools_class=Empty)
