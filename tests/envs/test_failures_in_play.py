"""What a failed rollout states of itself, wherever it is played."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from guess_game import Counting, GuessEnv, tasks

from agentsgym.agents.base import Agent, AsyncAgent
from agentsgym.envs.play import play
from agentsgym.failures import FailureLog
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool


class Fragile(GuessEnv):
    """Breaks at the guess of 2, in the second turn, and when it is to make a task of 99."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        if task_data["solution"] == 99:
            raise KeyError("no such room")
        return super()._initialize_episode(session_id, task_data)

    def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
        if action == "2":
            raise OSError("gone")
        return super()._step_episode(session_id, state, action)


LINE = Fragile._step_episode.__code__.co_firstlineno + 2


@pytest.fixture(params=["here", "threads", "processes"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "here":
        yield None
    else:
        with {"threads": EnvThreadPool, "processes": EnvProcessPool}[request.param](1) as workers:
            yield workers


def test_the_log_names_task_turn_environment_and_line_and_counts_the_rest(
    pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        won, *broken, unborn = Fragile().rollout(tasks(1, 5, 6, 7, 99), Counting(), pool=pool)
    assert not won.failed
    sentence = r"EnvError: Fragile\._step_episode raised OSError: gone"
    where = rf"task \d, rollout 0, turn 1 of Fragile, at {re.escape(__file__)}:{LINE}"
    patterns = [
        rf"session {unborn.session_id} failed: task 4, rollout 0 of Fragile, at .*: "
        r"EnvError: Fragile\._initialize_episode raised KeyError: 'no such room'",
        rf"session [0-9a-f]{{32}} failed: {where}: {sentence}",
        rf"… and 2 more of the same kind: {where}: {sentence}",
    ]
    assert len(caplog.records) == 3
    for pattern, record in zip(patterns, caplog.records, strict=True):
        assert re.fullmatch(pattern, record.getMessage())
    for task, trajectory in enumerate(broken, start=1):
        lines = (trajectory.error or "").splitlines()
        assert lines[0] == f"task {task}, rollout 0, turn 1 of Fragile, at {__file__}:{LINE}"
        assert lines[-1] == "OSError: gone"
        assert [line for line in lines if "agentsgym/envs/" in line or "agentsgym/rollouts/" in line] == []


def test_a_hook_that_returns_nonsense_is_found_where_it_is_defined(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(GuessEnv):
        """Returns nothing."""

        def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
            return {"guess": action}

    line = Silent._step_episode.__code__.co_firstlineno
    with caplog.at_level(logging.WARNING):
        one, two = Silent().rollout(tasks(1, 2), Counting())
    assert [str(trajectory.error).splitlines() for trajectory in (one, two)] == [
        [
            f"task {task}, rollout 0, turn 0 of Silent, at {__file__}:{line}",
            "EnvError: _step_episode must return (state, reward, done, info), got {'guess': '1'}",
        ]
        for task in (0, 1)
    ]
    assert [record.getMessage()[:18] for record in caplog.records] == [
        f"session {one.session_id[:10]}",
        "… and 1 more of th",
    ]


def test_a_hook_whose_arguments_do_not_fit_is_found_where_it_is_defined() -> None:
    def few(self: Any, session_id: str, action: str) -> Any:
        return None

    (trajectory,) = type("Few", (GuessEnv,), {"_step_episode": few})().rollout(tasks(1), Counting())
    head, sentence, cause = str(trajectory.error).splitlines()
    assert head == f"task 0, rollout 0, turn 0 of Few, at {__file__}:{few.__code__.co_firstlineno}"
    assert sentence.endswith(f"raised {cause}")
    assert cause.endswith("few() takes 3 positional arguments but 4 were given")


@pytest.mark.parametrize(("base", "name"), [(object, "get_action"), (Agent, "act"), (AsyncAgent, "aact")])
def test_an_agent_whose_arguments_do_not_fit_is_found_where_it_is_defined(base: type[Any], name: str) -> None:
    def none(self: Any) -> Any:
        return None

    (trajectory,) = GuessEnv().rollout(tasks(1), type("Mine", (base,), {name: none})())
    head, sentence, cause = str(trajectory.error).splitlines()
    assert head.endswith(f" of GuessEnv, at {__file__}:{none.__code__.co_firstlineno}")
    assert sentence == f"AgentError: Mine.{name} raised {cause}"


def test_calls_that_share_a_log_count_their_failures_together(caplog: pytest.LogCaptureFixture) -> None:
    with FailureLog(logging.getLogger("run")) as log:
        for _ in range(3):
            play(Fragile().trials(tasks(5)), Counting(), log=log)
    first, rest = (record.getMessage() for record in caplog.records)
    assert first.endswith("EnvError: Fragile._step_episode raised OSError: gone")
    assert rest.startswith("… and 2 more of the same kind: task 0, rollout 0, turn 1 of Fragile, at ")


def test_what_the_agent_raised_for_others_is_no_part_of_a_failure() -> None:
    class Raising(Agent):
        """Cannot answer at all."""

        def act(self, requests: Any) -> Any:
            raise OSError("no route")

    for trajectory in GuessEnv().rollout(tasks(1, 2, 3, 4), Raising()):
        lines = str(trajectory.error).splitlines()
        assert lines[1] == "AgentError: Raising.act raised OSError: no route"
        assert lines.count("OSError: no route") == 1


def test_an_episode_of_a_trial_is_named_too() -> None:
    config = {"episodes_per_trial": 2}
    (trajectory,) = Fragile(env_config=config).rollout(tasks(5), Counting())
    assert str(trajectory.error).startswith("task 0, rollout 0, episode 0, turn 1 of Fragile, at ")
