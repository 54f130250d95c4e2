"""What is kept of a failure, and the log of many."""

import json
import logging
import pickle
from typing import Any

import pytest

from agentsgym import Agent, AgentError, EnvError, StopReason, Trajectory
from agentsgym.failures import FailureLog, describe, failure_of, headline, kind_of


def hook(text: str) -> Any:
    """The user's code, which fails inside another package."""
    return json.loads(text)


def caught(function: Any, *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001  # whatever the test is about
        return error
    raise AssertionError("nothing was raised")


def test_a_failure_names_the_users_line_and_ends_with_the_cause() -> None:
    failure = failure_of(EnvError, "Guess._step_episode", caught(hook, "no JSON"))
    sentence = "Guess._step_episode raised JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert str(failure) == sentence
    assert failure.place == f"{__file__}:{hook.__code__.co_firstlineno + 2}"
    lines = describe(failure, "task 0, rollout 3, turn 1 of Guess").splitlines()
    assert lines[:3] == [
        f"task 0, rollout 3, turn 1 of Guess, at {failure.place}",
        f"EnvError: {sentence}",
        "Traceback (most recent call last):",
    ]
    assert "    return json.loads(text)" in lines
    assert lines[-1] == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_what_was_raised_while_another_error_was_handled_stays_to_be_seen() -> None:
    def step() -> None:
        try:
            hook("no JSON")
        except ValueError as error:
            raise OSError("gone") from error

    failure = failure_of(EnvError, "step", caught(step))
    assert failure.trace.index("JSONDecodeError") < failure.trace.index("direct cause") < failure.trace.index("OSError")
    assert failure.trace.endswith("OSError: gone")


def test_an_error_without_a_text_has_no_colon_behind_its_name() -> None:
    failure = failure_of(AgentError, "Mine.get_action", caught(next, iter(())))
    assert str(failure) == "Mine.get_action raised StopIteration"


def test_the_librarys_own_frames_are_left_out_unless_there_are_no_others() -> None:
    class Careless(Agent):
        """Fails in what the library calls."""

        def get_action(self, messages: Any, agent_state: Any) -> Any:
            raise OSError("no route")

    (failure,) = Careless().act([AnyRequest()])  # type: ignore[list-item]
    assert isinstance(failure, AgentError)
    assert [line for line in failure.trace.splitlines() if "agents/base.py" in line] == []
    (own,) = Agent().act([AnyRequest()])  # type: ignore[list-item]
    assert isinstance(own, AgentError)
    assert "agents/base.py" in own.trace


class AnyRequest:
    """What an agent reads of a request."""

    messages: tuple[Any, ...] = ()
    agent_state = None


def test_a_failure_that_is_sent_to_a_process_keeps_its_place_and_trace() -> None:
    failure = failure_of(AgentError, "Mine.get_action", caught(hook, ""))
    copied = pickle.loads(pickle.dumps(failure))
    assert (str(copied), copied.place, copied.trace) == (str(failure), failure.place, failure.trace)


def test_failures_are_of_one_kind_where_type_and_line_are_equal() -> None:
    first, second = (failure_of(EnvError, "hook", caught(hook, text)) for text in ("a", "[1, b"))
    other = failure_of(EnvError, "hook", caught(hook, None))
    kinds = [kind_of(describe(one, f"task {task}")) for task, one in enumerate((first, second, other))]
    assert kinds[0] == kinds[1] == f"JSONDecodeError at {first.place}"
    assert kinds[2] == f"TypeError at {first.place}"


@pytest.mark.parametrize(
    ("one", "other", "are_alike"),
    [
        ("reward must be a number, got nan", "reward must be a number, got 'x'", True),
        (f"session {'0a' * 16}, turn 3: late", f"session {'b1' * 16}, turn 12: late", True),
        ("reward must be a number, got nan", "done must be True or False, got nan", False),
    ],
)
def test_failures_without_an_exception_are_of_one_kind_where_the_sentence_is(
    one: str, other: str, are_alike: bool
) -> None:
    assert (kind_of(describe(EnvError(one), "here")) == kind_of(describe(EnvError(other), "there"))) is are_alike


def failed(error: str | None) -> Trajectory:
    stop_reason = StopReason.DONE if error is None else StopReason.FAILED
    return Trajectory(
        token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=stop_reason, error=error, session_id="s"
    )


def test_a_failure_that_comes_again_is_counted_and_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [failed(None)]
    for task in range(3):
        rollouts += [failed(describe(EnvError("the lights went out"), f"task {task} of Guess"))]
    rollouts += [failed(describe(AgentError("tired"), "task 9 of Guess")), failed("anything")]
    with caplog.at_level(logging.WARNING), FailureLog(logging.getLogger("test")) as log:
        for rollout in rollouts:
            log.note(rollout)
    assert [record.getMessage() for record in caplog.records] == [
        "session s failed: task 0 of Guess: EnvError: the lights went out",
        "session s failed: task 9 of Guess: AgentError: tired",
        "session s failed: anything",
        "… and 2 more of the same kind: task 0 of Guess: EnvError: the lights went out",
    ]


def test_a_headline_is_one_line() -> None:
    failure = failure_of(EnvError, "hook", caught(hook, "a"))
    assert headline(describe(failure, "task 0")) == f"task 0, at {failure.place}: EnvError: {failure}"
