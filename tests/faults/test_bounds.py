"""Texts of errors stay under 10 KB and lines of the log under 2 KB, whatever broke, and in how many words."""

import logging
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from guess_game import GuessEnv, tasks

from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.boundary import as_step
from agentsgym.errors import AgentError, ConfigError, EnvError, TaskError
from agentsgym.failures import FailureLog, describe, failure_of, headline, kind_of
from agentsgym.record_audit import audit
from agentsgym.types import Action, StopReason, Trajectory

MOST_ERROR, MOST_LINE = 10_000, 2_000
HUGE = "\x1b[2J" + "字" * 2_000_000


class NoTextError(Exception):
    """Its str raises."""

    def __str__(self) -> str:
        raise SystemExit(3)


class NoReprError(Exception):
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NoNotesError(Exception):
    """Its notes cannot be read."""

    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


def group() -> BaseException:
    return ExceptionGroup(HUGE, [ExceptionGroup("inner", [ValueError(HUGE)] * 30)] * 30)


def chained() -> BaseException:
    error: BaseException = ValueError("first")
    for number in range(200):
        later = ValueError(f"{number} {HUGE[:5000]}")
        later.__cause__ = error
        error = later
    return error


def noted() -> BaseException:
    error = ValueError("noted")
    for _ in range(50):
        error.add_note(HUGE[:100_000])
    return error


def syntax() -> BaseException:
    return SyntaxError("bad", ("x" * 5000, 3, "y", HUGE, "z", None))  # type: ignore[arg-type]


def deep(levels: int = 300) -> None:
    if levels:
        (deep if levels % 2 else deeper)(levels - 1)
    raise ValueError(HUGE)


def deeper(levels: int) -> None:
    deep(levels)


RAISED: dict[str, Callable[[], BaseException]] = {
    "long": lambda: ValueError(HUGE),
    "state": lambda: KeyError({"state": [HUGE] * 3}),
    "group": group,
    "chain": chained,
    "notes": noted,
    "syntax": syntax,
    "no text": NoTextError,
    "no repr": lambda: NoReprError(NoReprError()),
    "no notes": NoNotesError,
    "name": lambda: type("N" * 50_000, (Exception,), {})("x"),
}


def raise_(error: BaseException) -> None:
    raise error


def raised(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise_(make())
    except BaseException as error:  # noqa: BLE001  # whatever the test is about
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("name", RAISED)
def test_what_is_kept_of_an_error_is_short(name: str) -> None:
    failure = failure_of(EnvError, "Guess._step_episode", raised(RAISED[name]))
    text = describe(failure, "task 0, rollout 0, turn 3 of Guess")
    assert len(text.encode()) < MOST_ERROR
    assert len(headline(text).encode()) < MOST_LINE
    assert "\x1b" not in text
    assert len(kind_of(text).encode()) < MOST_LINE
    assert text.startswith("task 0, rollout 0, turn 3 of Guess")


def test_a_long_traceback_keeps_its_head_and_its_tail() -> None:
    try:
        deep()
    except ValueError as error:
        failure = failure_of(EnvError, "Guess._step_episode", error)
    assert failure.trace.startswith("Traceback (most recent call last):\n")
    assert "in test_a_long_traceback_keeps_its_head_and_its_tail" in failure.trace
    assert "parts of the traceback are omitted" in failure.trace
    assert "raise ValueError(HUGE)" in failure.trace
    assert "\nValueError: \\x1b[2J字" in failure.trace
    assert len(failure.trace.encode()) < MOST_ERROR


class Breaking(GuessEnv):
    """Raises in a hook, its state being megabytes long; or answers with something that is no step."""

    what: Callable[[], BaseException] | None = None
    answer: Any = None

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {**super()._initialize_episode(session_id, task_data), "board": [HUGE]}

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if self.what is not None:
            raise self.what()
        return self.answer if self.answer is not None else (state, "no number", False, {"all": state})


class NoRepr:
    """Neither its repr nor its truth can be had."""

    def __repr__(self) -> str:
        raise NoTextError

    def __bool__(self) -> bool:
        raise NoTextError


ANSWERS: list[Any] = [
    ({"board": [HUGE]}, 0.0),
    ({"board": [HUGE]}, {"reward": HUGE}, False, {}),
    ({"board": [HUGE]}, 0.0, HUGE, {}),
    (NoRepr(), 0.0, False, {}),
    ({}, NoRepr(), False, {}),
    ({}, 0.0, NoRepr(), {}),
    ({}, 0.0, False, {"success": NoRepr()}),
    NoRepr(),
    ({}, 10**5000, False, {}),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_is_no_step_is_shown_in_short(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    env = Breaking()
    env.answer = answer
    trajectory, other = env.rollout(tasks(1, 2), ScriptedAgent(["5"]))
    assert trajectory.failed
    assert other.failed
    assert len(str(trajectory.error).encode()) < MOST_ERROR
    assert all(len(record.getMessage().encode()) < MOST_LINE for record in caplog.records)


@pytest.mark.parametrize("name", RAISED)
def test_what_a_hook_raises_is_logged_in_short(name: str, caplog: pytest.LogCaptureFixture) -> None:
    env = Breaking()
    env.what = RAISED[name]
    trajectories = env.rollout(tasks(1, 2, 3), ScriptedAgent(["5"]))
    assert [one.stop_reason for one in trajectories] == [StopReason.FAILED] * 3
    assert all(len(str(one.error).encode()) < MOST_ERROR for one in trajectories)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # the first of its kind, and how many more there were
    assert all(len(line.encode()) < MOST_LINE for line in lines)


@pytest.mark.parametrize("answer", [NoRepr(), {"text": HUGE}, Action(text="\ud800" + HUGE), [HUGE] * 9], ids=range(4))
def test_an_answer_that_is_no_action_is_shown_in_short(answer: Any) -> None:
    class Odd(Agent):
        """Gives that answer."""

        def act(self, requests: Any) -> Any:
            return [answer for _ in requests]

    (trajectory,) = GuessEnv().rollout(tasks(1), Odd())
    assert trajectory.failed
    assert len(str(trajectory.error).encode()) < MOST_ERROR


@pytest.mark.parametrize("answer", [None, [HUGE], ({"board": [HUGE]} for _ in "a"), ({}, [HUGE] * 9, False, {})])
def test_a_huge_state_is_not_written_out_to_be_cut(answer: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(EnvError):
            as_step({"board": [HUGE]} if answer is None else answer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_kinds_of_failures_without_end_are_not_logged_without_end(caplog: pytest.LogCaptureFixture) -> None:
    with FailureLog(logging.getLogger("bounds")) as log:
        for number in range(1000):
            kind = "".join(chr(ord("a") + int(digit)) for digit in str(number))
            error = describe(AgentError(f"{kind} {HUGE[:3000]}"), f"task {number}")
            log.note(
                Trajectory(
                    token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.FAILED, error=error
                )
            )
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 102
    assert lines[-1].startswith("… and 899 more of other kinds, e.g. task 100: AgentError: ")
    assert all(len(line.encode()) < MOST_LINE for line in lines)


def test_an_environment_that_does_not_close_is_logged_in_short(caplog: pytest.LogCaptureFixture) -> None:
    class Open(GuessEnv):
        """Does not close."""

        def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
            deep()

    Open(env_config={"max_steps_per_episode": 1}).rollout(tasks(1), ScriptedAgent(["5"]))
    (line,) = [record.getMessage() for record in caplog.records]
    assert len(line.encode()) < MOST_LINE
    assert line.startswith("session ")
    assert "could not be closed: " in line


@pytest.mark.parametrize(
    "make",
    [
        lambda: GuessEnv(env_config={HUGE: 1}),
        lambda: GuessEnv(env_config={"max_steps_per_episode": HUGE}),
        lambda: GuessEnv(env_config=HUGE),  # type: ignore[arg-type]
        lambda: GuessEnv(HUGE),  # type: ignore[arg-type]
        lambda: GuessEnv().rollout([HUGE], ScriptedAgent(["5"])),  # type: ignore[list-item]
        lambda: GuessEnv().rollout(HUGE, ScriptedAgent(["5"])),  # type: ignore[arg-type]
        lambda: GuessEnv().rollout(
            [{"task_data": {"number": 5}, "env_class_path": HUGE, "env_config": {}}], ScriptedAgent(["5"])
        ),
        lambda: GuessEnv().rollout([{"task_data": [HUGE], "env_config": {}}], ScriptedAgent(["5"])),
        lambda: ScriptedAgent(HUGE),  # type: ignore[arg-type]
    ],
    ids=range(9),
)
def test_what_is_refused_is_shown_in_short(make: Callable[[], Any]) -> None:
    with pytest.raises((ConfigError, TaskError)) as raised:
        make()
    assert len(str(raised.value).encode()) < MOST_ERROR
    assert "\x1b" not in str(raised.value)


def test_an_audit_of_huge_rollouts_is_short() -> None:
    broken: Any = Trajectory(
        token_ids=[HUGE],  # type: ignore[list-item]
        turns=[],
        messages=[{"role": 7, "content": HUGE}],  # type: ignore[typeddict-item]
        final_reward=0.0,
        stop_reason=StopReason.DONE,
        session_id=HUGE,
        error=HUGE,
    )
    report = audit([broken] * 30)
    assert len(report.problems) >= 30
    assert len(str(report).encode()) < MOST_ERROR
    assert "\x1b" not in str(report)
