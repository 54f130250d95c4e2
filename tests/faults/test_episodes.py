"""Whatever foreign code raises, wherever it is called, fails its own episode and no other."""

from __future__ import annotations

import logging
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from faulty_game import (
    FAULTS,
    HOOKS,
    Batching,
    Concurrent,
    FaultyGame,
    Simple,
    break_history,
    prompt_of,
    raise_fault,
    tasks,
)

from agentsgym import Action, Agent, EnvProcessPool, EnvThreadPool, TaskError
from agentsgym.interruptions import Interruption, is_interruption, process_exit
from agentsgym.testing import chat_tokenizer

CONFIG = {"history": break_history}


@pytest.fixture(params=[None, EnvThreadPool, EnvProcessPool], ids=["here", "threads", "processes"], scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param is None:
        yield None
        return
    with request.param(2) as workers:
        yield workers


def assert_only_the_second_failed(trajectories: Any, fault: str) -> None:
    assert [one.failed for one in trajectories] == [False, True, False]
    assert f"raised {fault}" in trajectories[1].error
    assert all(one.final_reward == 2.0 for one in (trajectories[0], trajectories[2]))


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_hook_raises_fails_its_own_episode(fault: str, pool: Any) -> None:
    breaks = [each for hook in HOOKS for each in ("nothing", f"{hook} {fault}", "nothing")]
    env = FaultyGame(None, CONFIG)
    trajectories = env.rollout(tasks(*breaks), Batching(), pool=pool)
    for start in range(0, len(breaks), 3):
        assert_only_the_second_failed(trajectories[start : start + 3], fault)
    assert env.active_states == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_closing_an_episode_raises_is_counted_and_changes_no_result(fault: str, pool: Any) -> None:
    for agent in (Batching(), Concurrent()):
        trajectories = FaultyGame().rollout(tasks("nothing", f"_close_episode {fault}"), agent, pool=pool)
        assert [one.num_close_errors for one in trajectories] == [0, 1]
        assert not any(one.failed for one in trajectories)


@pytest.mark.parametrize("agent", [Simple, Batching, Concurrent])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_an_agent_raises_fails_its_own_episode(fault: str, agent: Any, pool: Any) -> None:
    trajectories = FaultyGame().rollout(tasks("nothing", f"agent {fault}", "nothing"), agent(), pool=pool)
    # Python itself makes a RuntimeError of a coroutine's StopIteration.
    is_changed = agent is Concurrent and fault == "StopIteration"
    assert_only_the_second_failed(trajectories, "RuntimeError" if is_changed else fault)


@pytest.mark.parametrize("agent", [Batching, Concurrent])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_agent_that_cannot_finish_loses_no_rollout(fault: str, agent: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken = type("Broken", (agent,), {"finish": lambda self: raise_fault(fault)})()
    with caplog.at_level(logging.WARNING):
        trajectories = FaultyGame().rollout(tasks("nothing"), broken)
    assert not trajectories[0].failed
    assert f"Broken.finish raised {fault}" in caplog.text


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_the_check_of_a_task_raises_is_a_task_error(fault: str) -> None:
    def check(self: Any, task_data: Any) -> None:
        raise_fault(fault)

    env = type("Checking", (FaultyGame,), {"_check_task": check})()
    with pytest.raises(TaskError, match=rf"checking task_data_list\[0\] with .* raised {fault}"):
        env.rollout(tasks("nothing"), Simple())


class Uncopyable:
    """Can be copied only so often."""

    def __init__(self, num_copies: int) -> None:
        self.left = [num_copies]

    def __deepcopy__(self, memo: Any) -> Any:
        self.left[0] -= 1
        if self.left[0] < 0:
            sys.exit("no more copies")
        return self


@pytest.mark.parametrize(
    "value", [threading.Lock(), (n for n in ()), [Uncopyable(0)]], ids=["lock", "generator", "own"]
)
def test_a_task_that_cannot_be_copied_is_refused_before_anything_is_played(value: Any) -> None:
    seen: list[Any] = []
    rows = [*tasks("nothing"), {"breaks": "nothing", "seed": 0, "extra": value}]
    with pytest.raises(TaskError, match=r"task_data_list\[1\]\['extra'\] must support copy.deepcopy"):
        FaultyGame().rollout(rows, Simple(), on_finish=seen.append)
    assert not seen


def test_a_task_that_cannot_be_copied_any_more_fails_its_episode_alone() -> None:
    row = {"breaks": "nothing", "seed": 0, "extra": Uncopyable(2)}  # the check's copy, and the first rollout's
    trajectories = FaultyGame().rollout([row], Simple(), 2)
    assert [one.failed for one in trajectories] == [False, True]
    assert "deepcopy raised SystemExit: no more copies" in str(trajectories[1].error)


class Sly(dict[str, Any]):
    """Raises when it is looked at."""

    def get(self, key: Any, default: Any = None) -> Any:
        sys.exit("closed")

    def __repr__(self) -> str:
        raise GeneratorExit


class Unhashable:
    """Raises where a type that has no hash would."""

    def __hash__(self) -> int:  # noqa: PLE0309
        sys.exit("no hash")

    def __float__(self) -> float:
        sys.exit("no number")

    def __bool__(self) -> bool:  # noqa: PLE0304
        sys.exit("neither")

    def __repr__(self) -> str:
        sys.exit("no repr")


class SlyList(list[Any]):
    """A list that can be neither counted nor read."""

    def __len__(self) -> int:  # noqa: PLE0303
        sys.exit("closed")

    def __iter__(self) -> Any:
        sys.exit("closed")


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("_initialize_episode", Sly(done=False)),
        ("_initialize_episode", Unhashable()),
        ("_format_prompt", [Sly(role="user", content="a")]),
        ("_format_prompt", SlyList()),
        ("_system_prompt", Unhashable()),
        ("_state_key", Unhashable()),
        ("_role", Unhashable()),
        ("_potential", Unhashable()),
        *[("_step_episode", value) for value in (Unhashable(), (Sly(), 0.0, False, {}), ({}, 0.0, False, Sly()))],
        *[("_step_episode", value) for value in (({}, Unhashable(), False, {}), ({}, 0.0, Unhashable(), {}))],
        ("_final_reward", Unhashable()),
        ("_calculate_rewards", Unhashable()),
        ("_calculate_rewards", SlyList()),
    ],
)
def test_what_a_hook_returns_may_raise_when_it_is_looked_at(hook: str, value: Any) -> None:
    def returning(self: Any, *arguments: Any) -> Any:
        breaks = next((each["breaks"] for each in arguments if isinstance(each, dict) and "breaks" in each), "this")
        return value if breaks == "this" else getattr(FaultyGame, hook)(self, *arguments)

    env = type("Sly", (FaultyGame,), {hook: returning})()
    is_reported = hook not in {"_system_prompt", "_calculate_rewards"}
    breaks = ("nothing", "this") if is_reported else ("this", "this")
    trajectories = env.rollout(tasks(*breaks), Simple())
    assert [one.failed for one in trajectories] == [not is_reported, True]


@pytest.mark.parametrize(
    "answer", [Unhashable(), Action(text="go", token_ids=SlyList([1])), SlyList()], ids=["repr", "ids", "list"]
)
def test_what_an_agent_answers_may_raise_when_it_is_looked_at(answer: Any) -> None:
    class Answering(Agent):
        """Answers this where it is made to."""

        def act(self, requests: Any) -> Any:
            return [answer if "this" in one.messages[0]["content"] else Action(text="go") for one in requests]

    class Alone(Agent):
        """Answers this in place of a list."""

        def act(self, requests: Any) -> Any:
            return answer

    class Single(Agent):
        """Answers this in place of a pair."""

        def get_action(self, messages: Any, agent_state: Any) -> Any:
            return answer

    trajectories = FaultyGame().rollout(tasks("nothing", "this"), Answering())
    assert [one.failed for one in trajectories] == [False, True]
    for agent in (Alone(), Single()):
        assert [one.failed for one in FaultyGame().rollout(tasks("nothing", "this"), agent)] == [True, True]


def test_what_a_signals_handler_raises_inside_a_hook_ends_the_run() -> None:
    """Who wrote ``signal.signal(SIGTERM, lambda *_: sys.exit(1))`` wants the process to exit, whatever it is doing."""

    class Signaled(FaultyGame):
        """Is sent a signal in its first step."""

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return super()._step_episode(session_id, state, action)

    env = Signaled()
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit, match="3"):
            env.rollout(tasks("nothing", "nothing"), Simple())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert env.active_states == {}


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Interruption(), process_exit()])
def test_what_comes_from_outside_passes_through_a_hook(interrupt: BaseException) -> None:
    def interrupted(self: Any, *arguments: Any) -> Any:
        raise interrupt

    assert is_interruption(interrupt)
    for hook in ("_initialize_episode", "_step_episode", "_close_episode"):
        env = type("Interrupted", (FaultyGame,), {hook: interrupted})()
        with pytest.raises(type(interrupt)):
            env.rollout(tasks("nothing", "nothing"), Simple())
        assert env.active_states == {}


def test_what_a_policy_in_training_raises_as_it_finishes_is_raised() -> None:
    """Its ranks wait for each other in there."""

    class InTraining(Batching):
        """A policy, as far as the driver can see."""

        def prepare(self, start: Any) -> None:
            """Do nothing."""

        def finish(self) -> None:
            raise RuntimeError("the others are gone")

    with pytest.raises(RuntimeError, match="the others are gone"):
        FaultyGame().rollout(tasks("nothing"), InTraining())


class SlyText(str):
    """Text whose methods are foreign code; as characters it is in order."""

    __slots__ = ()

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        sys.exit("a method of the text")

    encode = __eq__ = __str__ = __repr__ = __len__ = __bool__ = __reduce_ex__ = split = strip = _raise
    __hash__ = str.__hash__


def test_text_of_a_foreign_type_is_taken_for_its_characters() -> None:
    class Env(FaultyGame):
        def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
            text = SlyText("one") if step else SlyText("nothing")
            return [{"role": SlyText("user"), "content": text}] if step else text

        def _system_prompt(self) -> Any:
            return SlyText("play")

    def history(messages: Any) -> Any:
        return [{**message, "content": SlyText(message["content"])} for message in messages]

    class Answering(Agent):
        def act(self, requests: Any) -> list[Action]:
            return [Action(text=SlyText("go")) for _ in requests]

    for tokenizer in (None, chat_tokenizer("chatml")):
        (game,) = Env(tokenizer, {"history": history}).rollout(tasks("nothing"), Answering())
        assert game.error is None
        output = [(message["role"], message["content"]) for message in game.messages]
        assert {type(text) for pair in output for text in pair} == {str}
        assert output == [
            ("system", "play"), ("user", "nothing"), ("assistant", "go"), ("user", "one"), ("assistant", "go")
        ]  # fmt: skip
        assert pickle.loads(pickle.dumps(game)) == game


def test_text_that_cannot_be_sent_to_a_process_fails_its_episode_alone() -> None:
    class Answering(Agent):
        def act(self, requests: Any) -> list[Action]:
            requested = [prompt_of(request.messages) for request in requests]
            return [Action(text=SlyText("go") if prompt == "this" else "go") for prompt in requested]

    with EnvProcessPool(1) as workers:
        games = FaultyGame().rollout(tasks("nothing", "this", "nothing"), Answering(), pool=workers)
    assert [one.failed for one in games] == [False, True, False]
    assert "its action could not be sent to its process: a method of the text" in str(games[1].error)
