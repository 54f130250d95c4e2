"""A stream of trials: what is added is played, results come as soon as they are there, and its end is clean."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentsgym.agents.base import Agent, AsyncAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.errors import AgentsGymError
from agentsgym.rollouts.driver import ConcurrentCaller, TrialStream
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.types import Action, Trajectory, TurnRequest


class Countdown(MultistepEnv):
    """Lasts as many turns as the task states."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "left": task_data["turns"]}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{state['left']} left"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> tuple[Any, float, bool, Any]:
        left = state["left"] - 1
        return {**state, "left": left}, 1.0, left == 0, {}


class Batched(Agent):
    """Answers in batches, and counts its ends."""

    num_finished = 0

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        return [Action(text="go") for _ in requests]

    def finish(self) -> None:
        self.num_finished += 1


class Single(AsyncAgent):
    """Answers each request by itself."""

    num_finished = 0

    async def aact(self, request: TurnRequest) -> Action:
        await asyncio.sleep(0.001)
        return Action(text="go")

    def finish(self) -> None:
        self.num_finished += 1


class Broken(Agent):
    """Ends the process, as far as it knows."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        raise KeyboardInterrupt


class Results:
    """The rollouts that were finished, in order."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self._changed = threading.Condition()

    def __call__(self, trajectory: Trajectory) -> None:
        with self._changed:
            self.trajectories.append(trajectory)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[Trajectory]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.trajectories) >= count, 30)
            return [*self.trajectories]


def num_kept() -> int:
    """Answers that callers of coroutines still know of."""
    return sum(len(one._tasks) for one in gc.get_objects() if type(one) is ConcurrentCaller)


def trials(env: Countdown, *turns: int) -> list[Any]:
    return [trial for count in turns for trial in env.trials([{"turns": count, "seed": 0}])]


POOLS: dict[str, Callable[[], Any]] = {
    "inline": lambda: None,
    "threads": lambda: EnvThreadPool(2),
    "processes": lambda: EnvProcessPool(2),
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("make_agent", [Batched, Single])
def test_what_is_added_while_others_play_is_played_whole(pool: str, make_agent: Callable[[], Any]) -> None:
    env, results, agent, used = Countdown(), Results(), make_agent(), POOLS[pool]()
    stream = TrialStream(agent, results, max_concurrent=3, pool=used)
    stream.add(trials(env, 3, 5))
    results.wait_for(1)
    stream.add(trials(env, 1, 2, 7, 4))
    played = results.wait_for(6)
    stream.close()
    assert sorted(one.num_turns for one in played) == [1, 2, 3, 4, 5, 7]
    assert all(one.final_reward == one.num_turns and not one.failed for one in played)
    assert agent.num_finished == 1
    if used is not None:
        used.close()


@pytest.mark.parametrize("make_agent", [Batched, Single])
def test_what_is_added_begins_while_a_long_one_is_in_play(make_agent: Callable[[], Any]) -> None:
    env, results = Countdown(env_config={"max_steps_per_episode": 100_000}), Results()
    stream = TrialStream(make_agent(), results, max_concurrent=3)
    stream.add(trials(env, 100_000))
    time.sleep(0.05)
    stream.add(trials(env, 1, 2))
    assert [one.num_turns for one in results.wait_for(2)] == [1, 2]
    began = time.monotonic()
    stream.close()
    assert time.monotonic() - began < 5.0
    assert len(results.trajectories) == 2  # the long one is dropped


@pytest.mark.parametrize("make_agent", [Batched, Single])
def test_a_stream_forgets_what_is_finished(make_agent: Callable[[], Any]) -> None:
    env, results = Countdown(), Results()
    stream = TrialStream(make_agent(), results, max_concurrent=4)
    for count in range(1, 4):
        stream.add(trials(env, *[2] * 50))
        results.wait_for(50 * count)
    scheduler = stream._scheduler
    deadline = time.monotonic() + 10
    while (scheduler.trials or scheduler._turns or scheduler._results or num_kept()) and time.monotonic() < deadline:
        time.sleep(0.01)  # the last result is handed over before it is forgotten
    assert [*scheduler.trials, *scheduler._turns, *scheduler._results] == []
    assert not num_kept()
    stream.close()
    assert not env.active_states


def test_closing_drops_what_is_in_play() -> None:
    env, results = Countdown(), Results()
    stream = TrialStream(Single(), results, max_concurrent=2)
    stream.add(trials(env, 1, 100_000))
    results.wait_for(1)
    stream.close()
    assert not env.active_states
    assert [one.num_turns for one in results.trajectories] == [1]


def test_results_may_add_trials() -> None:
    env, results = Countdown(), Results()

    def finished(trajectory: Trajectory) -> None:
        if trajectory.num_turns < 5:
            stream.add(trials(env, trajectory.num_turns + 1))
        results(trajectory)

    stream = TrialStream(Batched(), finished, max_concurrent=1)
    stream.add(trials(env, 1))
    assert [one.num_turns for one in results.wait_for(5)] == [1, 2, 3, 4, 5]
    stream.close()


def test_what_breaks_a_stream_reaches_who_looks() -> None:
    stream = TrialStream(Broken(), Results(), max_concurrent=1)
    stream.check()
    stream.add(trials(Countdown(), 1))
    stream._thread.join(30)
    with pytest.raises(AgentsGymError, match="the rollouts failed: KeyboardInterrupt"):
        stream.check()


def test_a_limit_of_time_ends_one_trial_alone() -> None:
    class Slow(Single):
        async def aact(self, request: TurnRequest) -> Action:
            if "9 left" in request.messages[-1]["content"]:
                await asyncio.sleep(60)
            return Action(text="go")

    env, results = Countdown(), Results()
    stream = TrialStream(Slow(), results, max_concurrent=4, turn_timeout_s=0.3)
    stream.add(trials(env, 10, 2, 3))
    played = results.wait_for(3)
    stream.close()
    assert sorted((one.num_turns, one.failed) for one in played) == [(1, True), (2, False), (3, False)]
