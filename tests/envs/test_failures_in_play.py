"""What a failed rollout states of itself, and what each choice of a failure policy makes of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from guess_game import WIN, Counting, GuessEnv, tasks

from agentsgym import FailurePolicy, evaluate
from agentsgym.agents.base import Agent, AsyncAgent
from agentsgym.envs.play import play
from agentsgym.errors import ConfigError, TooManyFailuresError
from agentsgym.failures import FailureLog
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.types import Action, Trajectory, TurnRequest


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


class Flaky(GuessEnv):
    """Breaks in the first attempts of each session: as many as its task states for its rollout."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.attempts: dict[str, int] = {}
        self.starts: list[tuple[int, int]] = []

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        attempt = self.attempts[session_id] = self.attempts.get(session_id, -1) + 1
        self.starts.append((task_data["seed"], self.rng(session_id).getrandbits(30)))
        place = list(self.attempts).index(session_id)
        failing = task_data["failing"][place % len(task_data["failing"])]
        return {**super()._initialize_episode(session_id, task_data), "breaks": attempt < failing}

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if state["breaks"]:
            raise OSError(f"attempt {self.attempts[session_id]}")
        return super()._step_episode(session_id, state, action)


def task(*failing: int) -> list[dict[str, Any]]:
    """One task whose rollouts fail so many times each before they succeed."""
    return [{"solution": 1, "seed": 5, "failing": failing}]


class AsyncCounting(AsyncAgent):
    """Guesses 1, with a coroutine."""

    async def aact(self, request: TurnRequest) -> Action:
        return Action(text="1")


@pytest.mark.parametrize("agent", [Counting, AsyncCounting])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_failed_rollouts_are_played_again_in_their_own_places(agent: Any, num_threads: int) -> None:
    seen: list[Trajectory] = []
    env = Flaky()
    pool = EnvThreadPool(num_threads) if num_threads else None
    trajectories = env.rollout(
        task(0, 2, 1, 9),
        agent(),
        4,
        failures=FailurePolicy.retry(2),
        on_finish=seen.append,
        pool=pool,
        max_concurrent=1,
    )
    if pool is not None:
        pool.close()
    assert [one.failed for one in trajectories] == [False, False, False, True]
    assert [one.num_retries for one in trajectories] == [0, 2, 1, 2]
    assert [one.rollout_index for one in trajectories] == [0, 1, 2, 3]
    assert [one.session_id for one in trajectories] == list(env.attempts)
    assert [one.final_reward for one in trajectories] == [WIN, WIN, WIN, 0.0]
    assert "OSError: attempt 2" in str(trajectories[3].error)
    assert [one.rollout_index for one in seen] == [0, 2, 1, 3]  # each once, its last attempt
    assert {id(one) for one in seen} == {id(one) for one in trajectories}
    assert len(set(env.starts)) == 1  # the same start, every time


def test_a_new_seed_is_derived_and_shared_by_the_rollouts_that_are_played_again() -> None:
    policy = FailurePolicy(max_retries=2, retry_seed="new")
    starts = []
    for _ in range(2):
        env = Flaky()
        trajectories = env.rollout(task(0, 1, 2, 1), Counting(), 4, failures=policy)
        assert [one.num_retries for one in trajectories] == [0, 1, 2, 1]
        starts.append(env.starts)
    first, again, last = starts[0][:4], starts[0][4:7], starts[0][7:]
    assert [len(set(attempt)) for attempt in (first, again, last)] == [1, 1, 1]
    assert len({first[0], again[0], last[0]}) == 3
    assert starts[0] == starts[1]


def test_starts_that_differ_by_their_new_seed_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Told(Flaky):
        """Answers its draw."""

        def _format_prompt(self, state: dict[str, Any], step: int) -> Any:
            return f"{super()._format_prompt(state, step)} {self.starts}"

    Told().rollout(task(0, 1), Counting(), 2, failures=FailurePolicy.retry(1, retry_seed="new"), max_concurrent=1)
    assert "started with different prompts" not in caplog.text


def test_failing_fast_ends_at_the_first_failure_and_keeps_what_is_finished() -> None:
    with pytest.raises(TooManyFailuresError, match=r"1 of 3 rollouts failed.*\n.*\n.*OSError: attempt 0") as caught:
        Flaky().rollout(task(0, 1, 0), Counting(), 3, failures=FailurePolicy.fail_fast(), max_concurrent=1)
    assert [one.failed for one in caught.value.trajectories] == [False, True]


def test_only_last_attempts_count_as_failed() -> None:
    kept = Flaky().rollout(task(1, 1, 1), Counting(), 3, failures=FailurePolicy(max_retries=1, max_failed_fraction=0.0))
    assert [one.failed for one in kept] == [False] * 3


def test_small_groups_are_left_out() -> None:
    rows = [*task(0, 0, 0), *task(1, 1, 0), *task(0, 1, 0)]
    trajectories = Flaky().rollout(rows, Counting(), 3, failures=FailurePolicy(min_group_size=2))
    assert [one.task_index for one in trajectories] == [0, 0, 0, 2, 2, 2]
    assert [one.failed for one in trajectories] == [False] * 4 + [True, False]
    with pytest.raises(TooManyFailuresError, match=r"no task has min_group_size = 3 rollouts that did not fail; the"):
        Flaky().rollout(rows[1:], Counting(), 3, failures=FailurePolicy(min_group_size=3))
    padded = Flaky().run_trial(rows[:2], Counting(), 3, failures=FailurePolicy(min_group_size=2))
    assert len(padded["final_rewards"]) == 3


def test_evaluation_leaves_small_groups_out_of_its_estimates_and_counts_everything() -> None:
    env = Flaky()
    rows = [*task(0), {"solution": 2, "seed": 5, "failing": (1, 1, 0)}]
    rows[0]["failing"] = (0, 0, 0)
    policy = FailurePolicy(min_group_size=2)
    result = evaluate(env, Counting(), rows, 3, failures=policy)
    assert (result.num_episodes, result.num_failed, result.num_left_out) == (3, 2, 1)
    assert result.reward is not None
    assert result.reward.mean == WIN
    assert len(result.trajectories) == 6
    assert sum(result.stop_reasons.values()) == 6
    assert result.as_dict()["num_left_out"] == 1
    retried = evaluate(Flaky(), Counting(), rows, 3, failures=FailurePolicy.retry(1, min_group_size=2))
    assert (retried.num_episodes, retried.num_failed, retried.num_left_out) == (6, 0, 0)
    with pytest.raises(TooManyFailuresError) as caught:
        evaluate(Flaky(), Counting(), rows, 3, failures=FailurePolicy.fail_fast(), max_concurrent=1)
    assert [one.failed for one in caught.value.trajectories] == [False, False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_failed_fraction": 2}, "FailurePolicy.max_failed_fraction must be a number in [0, 1] or None, got 2"),
        ({"max_retries": -1}, "FailurePolicy.max_retries must be a non-negative int, got -1"),
        ({"retry_seed": "old"}, "FailurePolicy.retry_seed must be 'same' or 'new', got 'old'"),
        ({"min_group_size": 1.5}, "FailurePolicy.min_group_size must be a non-negative int, got 1.5"),
    ],
)
def test_an_impossible_policy_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        FailurePolicy(**changes)


def test_what_does_not_go_together_is_refused() -> None:
    env, agent = GuessEnv(), Counting()
    with pytest.raises(ConfigError, match="failures must be a FailurePolicy or None, got 'retry'"):
        env.rollout(tasks(1), agent, failures="retry")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"min_group_size=3 is larger than num_rollouts=2, so every task group would be dropped"
    ):
        env.rollout(tasks(1), agent, 2, failures=FailurePolicy(min_group_size=3))
    with pytest.raises(ConfigError, match=r"max_failed_fraction=0\.5 conflicts with 0\.0 in failures: set only one"):
        evaluate(env, agent, tasks(1), max_failed_fraction=0.5, failures=FailurePolicy.fail_fast())
    assert env.num_initialized == 0
