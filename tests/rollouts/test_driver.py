import itertools
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from bare_trials import drive
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, AgentError, ConfigError, TurnRequest
from agentsgym.interruptions import Interruption


def episode(name: str, num_turns: int, log: list[str] | None = None) -> Generator[TurnRequest, Action, Any]:
    """Requests ``num_turns`` times and returns what it was given; a fault ends it with the fault's text."""
    reported: list[str] = []
    try:
        for turn in range(num_turns):
            action = yield TurnRequest(session_id=name, messages=[], token_ids=[turn])
            reported.append(action.text)
    except AgentError as fault:
        return name, reported, str(fault)
    finally:
        if log is not None:
            log.append(name)
    return name, reported, None


class Echo:
    """Answers with the session's name and turn, and notes who was called together."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []
        self.finished = 0

    def act(self, requests: Sequence[TurnRequest]) -> Any:
        self.rounds.append([request.session_id for request in requests])
        return [Action(text=f"{request.session_id}{request.token_ids[0]}") for request in requests]

    def finish(self) -> None:
        self.finished += 1


def reported(name: str, num_turns: int) -> Any:
    return name, [f"{name}{turn}" for turn in range(num_turns)], None


@given(st.lists(st.integers(0, 5), max_size=8), st.none() | st.integers(1, 4))
def test_every_episode_gets_its_own_answers_in_order(lengths: list[int], max_concurrent: int | None) -> None:
    actor, seen = Echo(), []
    episodes = [episode(f"e{n}.", length) for n, length in enumerate(lengths)]
    results = drive(episodes, actor, max_concurrent=max_concurrent, on_finish=seen.append)
    assert results == [reported(f"e{n}.", length) for n, length in enumerate(lengths)]
    assert sorted(seen) == sorted(results)
    assert sum(map(len, actor.rounds)) == sum(lengths)
    assert all(1 <= len(requested) <= (max_concurrent or len(lengths)) for requested in actor.rounds)
    assert all(len(set(requested)) == len(requested) for requested in actor.rounds)
    assert actor.finished == 1


def test_a_round_calls_the_agent_once_for_all_live_episodes() -> None:
    actor = Echo()
    drive([episode("a", 3), episode("b", 1), episode("c", 2)], actor)
    assert actor.rounds == [["a", "b", "c"], ["a", "c"], ["a"]]


def test_a_place_that_becomes_free_is_taken_at_once() -> None:
    actor = Echo()
    drive((episode(name, length) for name, length in zip("abcd", [1, 3, 2, 1], strict=True)), actor, max_concurrent=2)
    assert actor.rounds == [["a", "b"], ["b", "c"], ["b", "c"], ["d"]]


def test_episodes_without_a_turn_call_nobody() -> None:
    actor = Echo()
    assert drive([episode("a", 0), episode("b", 0)], actor, max_concurrent=1) == [reported("a", 0), reported("b", 0)]
    assert drive([], actor) == []
    assert (actor.rounds, actor.finished) == ([], 2)


@pytest.mark.parametrize("max_concurrent", [0, -1, "a", 1.5, True])
def test_room_for_no_episode_is_refused(max_concurrent: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_concurrent must be a positive int or None, got {max_concurrent!r}"):
        drive([episode("a", 1)], Echo(), max_concurrent=max_concurrent)


class Allergic(Echo):
    """Cannot answer some sessions."""

    def __init__(self, culprits: set[str]) -> None:
        super().__init__()
        self.culprits = culprits

    def act(self, requests: Sequence[TurnRequest]) -> Any:
        answers = super().act(requests)
        if self.culprits & {request.session_id for request in requests}:
            raise OSError("bad request")
        return answers


@given(st.integers(1, 9), st.data())
def test_only_the_episodes_that_cannot_be_answered_fail(num_episodes: int, data: st.DataObject) -> None:
    names = [f"e{n}." for n in range(num_episodes)]
    culprits = data.draw(st.sets(st.sampled_from(names)))
    results = drive([episode(name, 2) for name in names], Allergic(culprits))
    for name, result in zip(names, results, strict=True):
        if name in culprits:
            assert result[:2] == (name, [])
            assert result[2] == "Allergic.act raised OSError: bad request"
        else:
            assert result == reported(name, 2)


def test_one_culprit_is_found_by_halving() -> None:
    actor = Allergic({"e5"})
    drive([episode(f"e{n}", 1) for n in range(16)], actor)
    assert [len(requested) for requested in actor.rounds] == [16, 8, 4, 4, 2, 1, 1, 2, 8]


class Answering(Echo):
    """Gives the same answer to everything."""

    def __init__(self, answers: Any) -> None:
        super().__init__()
        self.answers = answers

    def act(self, requests: Sequence[TurnRequest]) -> Any:
        return self.answers


@pytest.mark.parametrize("answers", [None, [], [Action(text="x")], [Action(text="x")] * 3, {"a": 1}, 3, iter([1, 2])])
def test_not_one_answer_a_request_fails_those_who_called(answers: Any) -> None:
    actor = Answering(answers)
    for name, heard, fault in drive([episode("a", 2), episode("b", 1)], actor):
        assert name in "ab"
        assert heard == []
        assert fault.startswith("Answering.act must return one Action per request: 2 requests, got ")
    assert actor.finished == 1


def test_a_long_nonsense_answer_is_shortened_in_the_message() -> None:
    [(_, _, fault)] = drive([episode("a", 1)], Answering(["x"] * 1000))
    assert len(fault) < 300


def test_a_fault_among_the_answers_reaches_its_own_episode() -> None:
    actor = Answering([Action(text="yes"), AgentError("asleep")])
    results = drive([episode("a", 1), episode("b", 5)], actor)
    assert results == [("a", ["yes"], None), ("b", [], "asleep")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interruption, ConfigError])
def test_what_is_no_episodes_fault_ends_the_run_and_closes_every_episode(error: Any) -> None:
    class Ending(Echo):
        """Ends the run in its second round."""

        def act(self, requests: Sequence[TurnRequest]) -> Any:
            if self.rounds:
                raise error
            return super().act(requests)

    actor, closed, seen = Ending(), [], []
    episodes = [episode(name, n + 1, closed) for n, name in enumerate("abc")]  # held, so that no collector ends them
    with pytest.raises(error):
        drive(episodes, actor, on_finish=seen.append)
    assert seen == [reported("a", 1)]
    assert sorted(closed) == ["a", "b", "c"]
    assert actor.finished == 1


def test_an_episode_that_raises_ends_the_run_and_closes_the_others() -> None:
    def broken() -> Generator[TurnRequest, Action, Any]:
        yield TurnRequest(session_id="x", messages=[], token_ids=[0])
        raise ValueError("a bug of ours")

    closed: list[str] = []
    actor = Echo()
    with pytest.raises(ValueError, match="a bug of ours"):
        drive([episode("a", 3, closed), broken(), episode("b", 3, closed)], actor)
    assert sorted(closed) == ["a", "b"]
    assert actor.finished == 1


def test_an_error_in_on_finish_is_not_swallowed() -> None:
    closed: list[str] = []

    def refuse(result: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        drive([episode("a", 1, closed), episode("b", 2, closed)], Echo(), on_finish=refuse)
    assert sorted(closed) == ["a", "b"]


def test_an_interruption_is_looked_for_before_each_step() -> None:
    """Not once a round only, since the steps of a round may take long together."""
    closed: list[str] = []
    steps: list[str] = []

    def stepping(name: str) -> Generator[TurnRequest, Action, Any]:
        try:
            for _ in range(3):
                steps.append(name)
                yield TurnRequest(session_id=name, messages=[], token_ids=[0])
        finally:
            closed.append(name)

    def interrupt() -> None:
        if len(steps) == 5:
            raise Interruption

    with pytest.raises(Interruption):
        drive([stepping(name) for name in "abc"], Echo(), interrupt=interrupt)
    assert steps == [*"abcab"]
    assert sorted(closed) == [*"abc"]


def test_a_thousand_episodes_advance_together() -> None:
    actor = Echo()
    results = drive([episode(str(n), 1 + n % 3) for n in range(1024)], actor)
    assert [result[0] for result in results] == [str(n) for n in range(1024)]
    assert [len(requested) for requested in actor.rounds] == [1024, 682, 341]
    assert list(itertools.chain(*actor.rounds)).count("5") == 3
