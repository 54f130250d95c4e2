"""``evaluate(store=…)``: every rollout is kept, and a resumed evaluation plays only what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.errors import AgentsGymError, ConfigError, StoreError, TooManyFailuresError
from agentsgym.evaluation.run import evaluate
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.statistics.metrics import Evaluation
from agentsgym.store import parts
from agentsgym.store.reader import RolloutStore
from agentsgym.types import Action, Trajectory, TurnRequest

TASKS = [{"word": "a"}, {"word": "b", "seed": 3}, {"word": "b", "seed": 3}, {"word": "crash"}, {"word": "c"}]


class Echo(MultistepEnv):
    """Shows a word and a draw, is rewarded for the word, and breaks on the word ``crash``."""

    num_begun = 0

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.num_begun += 1
        return {"word": task_data["word"], "coin": self.rng(session_id).randrange(1000), "done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{state['word']} {state['coin']}"

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if action == "crash":
            raise RuntimeError("it broke")
        won = action == "b"
        return state, float(won), won, {"success": won, "coin": (state["coin"], None)}


class Reader(Agent):
    """Answers the word that it is shown; may refuse to go on after some answers."""

    def __init__(self, num_answers: int = 10**9) -> None:
        self.num_answers = num_answers

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        actions: list[Action] = []
        for request in requests:
            if not self.num_answers:
                raise ConfigError("the key is refused")
            self.num_answers -= 1
            actions.append(Action(text=request.messages[-1]["content"].split()[0]))
        return actions


def play(env: Echo | None = None, agent: Any = None, tasks: Any = TASKS, **options: Any) -> Evaluation:
    env = env or Echo(env_config={"max_steps_per_episode": 2})
    return evaluate(env, agent or Reader(), tasks, 2, max_concurrent=2, **options)


def without_names(evaluation: Evaluation) -> Evaluation:
    """The sessions' names are drawn anew for each trial, and so is the line of a failure that names one."""
    anonymous = [
        dataclasses.replace(one, session_id="", error=one.error and one.error.splitlines()[0])
        for one in evaluation.trajectories
    ]
    return dataclasses.replace(evaluation, trajectories=anonymous)


def test_every_rollout_is_kept_with_what_played_it(tmp_path: Path) -> None:
    env = Echo(env_config={"max_steps_per_episode": 2})
    evaluation = play(env, store=tmp_path)
    store = RolloutStore(tmp_path)
    by_session = {one.session_id: one for one in evaluation.trajectories}
    assert len(store) == 10
    assert all(one == by_session[one.session_id] for one in store)
    assert {one.source for one in store.records()} == {"evaluation"}
    assert len({one.run for one in store.records()}) == 1
    record = store.record(0)
    assert (record.agent, record.env_class_path) == ("Reader", f"{__name__}.Echo")
    assert record.env_config == env.env_config
    assert without_names(evaluation) == without_names(play())  # keeping changes nothing


@settings(max_examples=30)
@given(num_answers=st.integers(0, 20), again=st.integers(0, 20))
def test_a_resumed_evaluation_is_that_of_an_uninterrupted_one(
    num_answers: int, again: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("store")
    for most in (num_answers, again):
        with pytest.MonkeyPatch.context() as quick:
            quick.setattr(parts.os, "fsync", lambda _: None)
            with contextlib.suppress(ConfigError):  # that the key is refused
                play(agent=Reader(most), store=path, resume=True, agent_name="reader")
    env = Echo(env_config={"max_steps_per_episode": 2})
    num_before = len(RolloutStore(path))
    seen: list[Trajectory] = []
    evaluation = play(env, store=path, resume=True, agent_name="reader", on_finish=seen.append)
    assert without_names(evaluation) == without_names(play())
    assert env.num_begun == len(seen) == 10 - num_before
    places = [(one.task_index, one.rollout_index) for one in RolloutStore(path)]
    assert sorted(places) == [(i, j) for i in range(5) for j in range(2)]
    assert len({record.run for record in RolloutStore(path).records()}) == 1


def test_a_finished_evaluation_is_read_and_nothing_played(tmp_path: Path) -> None:
    wanted = play(store=tmp_path, agent_name="me")
    evaluation = play(agent=Reader(0), store=tmp_path, resume=True, agent_name="me")
    assert evaluation == wanted
    assert len(RolloutStore(tmp_path)) == 10


def test_tasks_are_found_wherever_they_stand_in_the_list(tmp_path: Path) -> None:
    tasks = [{"word": word, "seed": index} for index, word in enumerate("abc")]
    play(tasks=tasks, store=tmp_path, agent_name="me")
    env = Echo(env_config={"max_steps_per_episode": 2})
    more = [{"word": "d", "seed": 7}, *({"seed": task["seed"], "word": task["word"]} for task in tasks[::-1])]
    evaluation = play(env, tasks=more, store=tmp_path, resume=True, agent_name="me")
    assert env.num_begun == 2
    assert [(one.task_index, one.task_data["word"]) for one in evaluation.trajectories] == [
        (index, word) for index, word in enumerate("dcba") for _ in range(2)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"agent_name": "other"},
        {"seed": 1},
        {"max_turn_tokens": 5},
        {"env": Echo(env_config={"max_steps_per_episode": 3})},
    ],
)
def test_what_was_played_otherwise_is_played_again(other: dict[str, Any], tmp_path: Path) -> None:
    tasks = [{"word": "a"}]
    play(tasks=tasks, store=tmp_path, agent_name="me")
    play(tasks=tasks, store=tmp_path, resume=True, **{"agent_name": "me", **other})
    assert len(RolloutStore(tmp_path)) == 4


def test_failed_rollouts_are_played_again_where_that_is_requested(tmp_path: Path) -> None:
    play(store=tmp_path, agent_name="me")
    env = Echo(env_config={"max_steps_per_episode": 2})
    evaluation = play(env, ScriptedAgent(["b"], repeat_last=True), store=tmp_path, resume="failed", agent_name="me")
    assert (env.num_begun, evaluation.num_failed) == (2, 0)
    assert play(agent=Reader(0), store=tmp_path, resume=True, agent_name="me").num_failed == 0  # the newest counts


def test_failures_that_are_stored_count_toward_the_limit(tmp_path: Path) -> None:
    tasks = [{"word": "crash"}, {"word": "a"}, {"word": "crash"}, {"word": "b"}]
    with pytest.raises(TooManyFailuresError) as first:
        play(tasks=tasks, store=tmp_path, agent_name="me", max_failed_fraction=0.3)
    assert len(RolloutStore(tmp_path)) == len(first.value.trajectories)
    with pytest.raises(TooManyFailuresError, match="of 8 rollouts failed") as second:
        play(tasks=tasks, store=tmp_path, resume=True, agent_name="me", max_failed_fraction=0.3)
    assert len(second.value.trajectories) >= len(first.value.trajectories)
    assert play(tasks=tasks, store=tmp_path, resume=True, agent_name="me").num_failed == 4


def test_the_limit_holds_where_everything_is_stored(tmp_path: Path) -> None:
    tasks = [{"word": "crash"}, {"word": "a"}]
    assert play(tasks=tasks, store=tmp_path, agent_name="me").num_failed == 2
    with pytest.raises(TooManyFailuresError, match="2 of 4 rollouts failed"):
        play(tasks=tasks, store=tmp_path, resume=True, agent_name="me", max_failed_fraction=0.3)


def test_a_writer_of_ones_own_stays_open_and_its_columns_count(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path, run="mine", agent="me", extra={"note": 1}) as writer:
        play(store=writer)
        evaluation = play(agent=Reader(0), store=writer, resume=True)
        writer.add(evaluation.trajectories[0])
    store = RolloutStore(tmp_path)
    assert len(store.filter(run="mine", agent="me")) == 11
    assert store.record(0).extra["note"] == 1


def test_threads_play_what_is_missing_too(tmp_path: Path) -> None:
    with pytest.raises(AgentsGymError):
        play(agent=Reader(5), store=tmp_path, agent_name="me")
    with EnvThreadPool(2) as pool:
        evaluation = play(store=tmp_path, resume=True, agent_name="me", pool=pool)
    assert without_names(evaluation) == without_names(play())


def test_a_full_disk_is_reported_once_and_the_evaluation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts.os, "fsync", full)
    with RolloutStore.writer(tmp_path, flush_every=1) as writer:
        assert len(play(store=writer).trajectories) == 10
        with pytest.raises(StoreError, match="10 rollouts cannot be written"):
            writer.flush()
        monkeypatch.undo()
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    assert len(RolloutStore(tmp_path)) == 10


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"resume": True}, ConfigError, "resume requires store"),
        ({"resume": True, "store": "x"}, ConfigError, "resume requires agent_name"),
        ({"resume": "all", "store": "x"}, ConfigError, "resume must be a bool or 'failed', got 'all'"),
        ({"store": 3}, ConfigError, "store must be a folder or a writer"),
        ({"store": __file__}, StoreError, "cannot create a rollout store"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_played(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        play(agent=Reader(0), **options)
