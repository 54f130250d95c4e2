"""The hook for finished rollouts: what it is given, what it may do with it, and when it is stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from guess_game import GuessEnv

from agentsgym import Agent, ConfigError, EnvError, FailurePolicy, ScriptedAgent, Trajectory
from agentsgym.envs.finished import Change, RolloutHook
from agentsgym.event_loop import is_on_agents_loop

TASKS = [{"seed": n} for n in range(4)]


def noted(text: str) -> Change:
    """Add a text to the info of a rollout."""
    return lambda one: dataclasses.replace(one, info={**one.info, "notes": [*one.info.get("notes", ()), text]})


class Noting(RolloutHook):
    """Notes each rollout, later the earlier it was finished; keeps what it was given."""

    label = "a note"

    def __init__(self, name: str = "a", *, takes_groups: bool = False, delay_s: float = 0.0) -> None:
        self.name, self.takes_groups, self.delay_s = name, takes_groups, delay_s
        self.given: list[list[int]] = []
        self.num_closed = self.num_canceled = 0

    async def changes(self, env: Any, trajectories: Sequence[Trajectory]) -> Sequence[Change]:
        assert is_on_agents_loop()
        self.given.append([one.rollout_index for one in trajectories])
        try:
            await asyncio.sleep(self.delay_s / len(self.given))
        except asyncio.CancelledError:
            self.num_canceled += 1
            raise
        return [noted(f"{self.name}{one.rollout_index}") for one in trajectories]

    def close(self) -> None:
        self.num_closed += 1


def env_with(*hooks: RolloutHook, kind: type[GuessEnv] = GuessEnv) -> GuessEnv:
    """An environment with hooks."""
    env = kind()
    env.judges = hooks
    return env


def agent() -> Agent:
    """Guesses the same number again and again."""
    return ScriptedAgent(["1"], repeat_last=True)


def notes_of(played: Sequence[Trajectory]) -> list[Any]:
    """The notes of each rollout."""
    return [one.info.get("notes") for one in played]


def test_results_are_in_order_whatever_ends_first() -> None:
    hook = Noting(delay_s=0.2)
    played = env_with(hook).rollout(TASKS, agent())
    assert [one.task_index for one in played] == [0, 1, 2, 3]
    assert notes_of(played) == [["a0"]] * 4
    assert hook.num_closed == 1


def test_changes_of_several_hooks_are_made_in_their_order_and_those_of_groups_last() -> None:
    slow, fast, last = Noting("a", delay_s=0.1), Noting("b"), Noting("c", takes_groups=True)
    played = env_with(last, slow, fast).rollout(TASKS[:2], agent(), num_rollouts=2)
    assert notes_of(played) == [["a0", "b0", "c0"], ["a1", "b1", "c1"]] * 2
    assert last.given == [[0, 1], [0, 1]]


class Failing(Noting):
    """Fails each rollout for the first time."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.seen: set[int] = set()

    async def changes(self, env: Any, trajectories: Sequence[Trajectory]) -> Sequence[Change]:
        [one] = trajectories
        if one.task_index not in self.seen:
            self.seen.add(one.task_index)
            raise self.error
        return await super().changes(env, trajectories)


def test_a_hook_may_fail_what_it_was_given_which_may_be_retried() -> None:
    env = env_with(Failing(EnvError("not good enough")), Noting("c", takes_groups=True))
    seen: list[Trajectory] = []
    failed = env.rollout(TASKS[:2], agent(), num_rollouts=2, on_finish=seen.append)
    assert [one.failed for one in failed] == [True, False, True, False]
    assert str(failed[0].error).splitlines() == ["task 0, rollout 0, after its last turn", "EnvError: not good enough"]
    assert notes_of(failed)[1::2] == [["a1", "c1"], ["a1", "c1"]]
    assert len(seen) == 4
    env = env_with(Failing(EnvError("not good enough")), last := Noting("c", takes_groups=True))
    played = env.rollout(TASKS[:2], agent(), num_rollouts=2, failures=FailurePolicy.retry(1))
    assert [one.num_retries for one in played] == [1, 0, 1, 0]
    assert notes_of(played) == [["a0", "c0"], ["a1", "c1"]] * 2
    assert last.given == [[0, 1], [0, 1]]


def test_an_error_that_concerns_every_rollout_ends_the_run() -> None:
    hook = Failing(ConfigError("it cannot be used"))
    with pytest.raises(ConfigError, match="it cannot be used"):
        env_with(hook).rollout(TASKS, agent())


def test_a_change_is_made_on_the_thread_that_plays() -> None:
    threads: set[threading.Thread] = set()

    class Changing(Noting):
        async def changes(self, env: Any, trajectories: Sequence[Trajectory]) -> Sequence[Change]:
            def change(one: Trajectory) -> Trajectory:
                threads.add(threading.current_thread())
                return one

            return [change]

    env_with(Changing()).rollout(TASKS, agent())
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize("takes_groups", [False, True])
def test_a_hook_is_stopped_with_the_run(takes_groups: bool) -> None:
    hook = Noting(takes_groups=takes_groups, delay_s=30)
    started = threading.Event()

    def interrupt() -> None:
        if hook.given and started.is_set():
            raise KeyboardInterrupt
        if hook.given:
            started.set()

    env, played = env_with(hook), list[Trajectory]()
    with pytest.raises(KeyboardInterrupt):
        _interrupted(env, interrupt, played.append)
    for _ in range(200):
        if hook.num_canceled == len(hook.given):
            break
        threading.Event().wait(0.02)
    assert hook.num_canceled == len(hook.given) > 0
    assert hook.num_closed == 0
    assert played == []


def _interrupted(env: GuessEnv, interrupt: Callable[[], None], on_finish: Callable[[Trajectory], None]) -> None:
    from agentsgym.envs.play import play  # noqa: PLC0415  # `rollout` has no argument for an interruption

    play(env.trials(TASKS[:1], 2), agent(), on_finish=on_finish, interrupt=interrupt)


def test_what_is_no_hook_is_refused() -> None:
    env = GuessEnv()
    env.judges = [agent()]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match=r"GuessEnv.judges must be a list of agentsgym.Judge, got \[<"):
        env.rollout(TASKS, agent())
