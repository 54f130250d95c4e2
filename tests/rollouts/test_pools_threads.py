"""Environments in threads: bounded, side by side, and given up when they hang."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from playground import RELEASE, AsyncParrot, Parrot, Playground, tasks, texts

from agentsgym import Action, ConfigError, EnvThreadPool, ScriptedAgent, StopReason
from agentsgym.testing import chat_tokenizer

LIMIT = 0.3


@pytest.fixture(params=[Parrot, AsyncParrot])
def agent(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    RELEASE.clear()
    yield
    RELEASE.set()


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    """Other tests of this process may have left pools that are still open."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def pool_threads() -> list[threading.Thread]:
    """The threads of the pools of this test."""
    threads = set(threading.enumerate()) - OTHERS
    return [thread for thread in threads if thread.name.startswith("agentsgym-environments")]


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, True, "2"])
def test_a_pool_of_no_threads_is_refused(num_workers: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_workers must be a positive int, got {num_workers!r}"):
        EnvThreadPool(num_workers)


def test_steps_run_side_by_side(agent: Any) -> None:
    """Two sessions meet in their steps: one after the other they would wait forever."""
    with EnvThreadPool(2) as pool:
        played = Playground().rollout(tasks("a pair stop", "b pair stop"), agent, pool=pool)
    assert [one.stop_reason for one in played] == [StopReason.DONE] * 2


def test_no_more_steps_run_than_there_are_threads(agent: Any) -> None:
    env = Playground()
    with EnvThreadPool(3) as pool:
        env.rollout(tasks(*["doze doze stop"] * 9), agent, pool=pool)
        assert len(pool_threads()) == 3
    assert env.most_running == 3


def test_threads_start_when_they_are_needed_and_end_with_the_pool(agent: Any) -> None:
    with EnvThreadPool(2) as pool:
        assert not pool_threads()
        for _ in range(2):
            Playground().rollout(tasks("a stop", "stop"), agent, pool=pool)
            assert len(pool_threads()) == 2
    assert not pool_threads()
    assert texts(Playground().rollout(tasks("a stop"), agent, pool=pool)[0]) == ["a", "stop"]
    pool.close()
    assert not pool_threads()


def test_a_pool_in_use_cannot_be_closed(agent: Any) -> None:
    with EnvThreadPool(1) as pool:
        with pytest.raises(ConfigError, match="an EnvThreadPool cannot be closed while a rollout uses it"):
            Playground().rollout(tasks("stop", "a b c stop"), agent, pool=pool, on_finish=lambda _: pool.close())
        assert texts(Playground().rollout(tasks("a stop"), agent, pool=pool)[0]) == ["a", "stop"]


def test_a_step_that_hangs_is_given_up_and_its_thread_replaced(agent: Any) -> None:
    env = Playground()
    with EnvThreadPool(2) as pool:
        first, stuck, second = env.rollout(
            tasks("a b c stop", "a hang b", "d stop"), agent, pool=pool, turn_timeout_s=LIMIT
        )
        assert (first.stop_reason, second.stop_reason) == (StopReason.DONE, StopReason.DONE)
        assert stuck.stop_reason is StopReason.FAILED
        assert [turn.reward for turn in stuck.turns] == [1.0]
        wanted = f"session {stuck.session_id}, turn 1: the environment took longer than turn_timeout_s = {LIMIT}"
        assert wanted in str(stuck.error)
        assert len(pool_threads()) == 3  # one of them hangs
        met = env.rollout(tasks("pair stop", "pair stop"), agent, pool=pool)  # needs both that are left
        assert [one.stop_reason for one in met] == [StopReason.DONE] * 2
        assert list(env.active_states) == [stuck.session_id]
        messages = list(stuck.messages)
        RELEASE.set()
        for thread in pool_threads():
            if thread not in pool._threads:
                thread.join(10)
        assert not env.active_states
        assert list(stuck.messages) == messages  # what the late step recorded is not in it
    assert not pool_threads()


def test_the_record_of_a_given_up_trial_is_whole() -> None:
    """The action whose step hangs is in the tokens, but no turn yet."""
    output = [Action(text=text, token_ids=[5, 6, 7], logprobs=[-1.0, -2.0, -3.0]) for text in ("a", "hang")]
    with EnvThreadPool(1) as pool:
        env = Playground(chat_tokenizer())
        [stuck] = env.rollout(tasks("-"), ScriptedAgent(output), pool=pool, turn_timeout_s=LIMIT)
    assert texts(stuck) == ["a", "hang"]
    assert [list(stuck.token_ids[turn.start : turn.stop]) for turn in stuck.turns] == [[5, 6, 7]]
    assert list(stuck.token_ids[-3:]) == [5, 6, 7]
    assert stuck.logprobs is not None
    assert [value for value in stuck.logprobs if value] == [-1.0, -2.0, -3.0]
    assert len(stuck.token_ids) == len(stuck.logprobs) == len(stuck.per_token_rewards)


def test_more_steps_hang_than_there_are_threads(agent: Any) -> None:
    with EnvThreadPool(1) as pool:
        played = Playground().rollout(tasks("hang", "hang", "a stop"), agent, pool=pool, turn_timeout_s=LIMIT)
    assert [one.failed for one in played] == [True, True, False]


def test_an_episode_whose_step_outlives_it_is_given_up(agent: Any) -> None:
    with EnvThreadPool(1) as pool:
        stuck, other = Playground().rollout(
            tasks("a hang", "a stop"), agent, pool=pool, max_concurrent=1, episode_timeout_s=LIMIT
        )
    assert f"the trial took longer than episode_timeout_s = {LIMIT}" in str(stuck.error)
    assert other.stop_reason is StopReason.DONE


def test_episodes_that_hang_while_others_wait_for_their_thread_end(agent: Any) -> None:
    with EnvThreadPool(1) as pool:
        played = Playground().rollout(tasks(*["a hang"] * 4), agent, pool=pool, episode_timeout_s=LIMIT)
        assert len(pool_threads()) >= 1
    assert all(f"the trial took longer than episode_timeout_s = {LIMIT}" in str(one.error) for one in played)


def test_a_step_that_waits_for_its_own_pool_fails() -> None:
    class Nested(Playground):
        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            Playground().rollout(tasks("stop"), Parrot(), pool=pool)
            return super()._step_episode(session_id, state, action)

    with EnvThreadPool(1) as pool:
        [stuck] = Nested().rollout(tasks("stop"), Parrot(), pool=pool)
    assert "a step that runs in an EnvThreadPool cannot start a rollout in the same pool" in str(stuck.error)


def test_an_interrupted_run_waits_for_the_steps_that_end(agent: Any) -> None:
    env = Playground()

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with EnvThreadPool(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            env.rollout(tasks("stop", "doze doze doze"), agent, pool=pool, on_finish=interrupt)
        assert not env.active_states
        assert len(pool_threads()) == 2
    assert not pool_threads()


def test_a_bug_in_a_step_ends_the_run_with_its_traceback(agent: Any) -> None:
    class Buggy(Playground):
        def start_session(self, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("a bug of ours")

    with EnvThreadPool(2) as pool, pytest.raises(RuntimeError, match="a bug of ours") as raised:
        Buggy().rollout(tasks("a stop", "stop"), agent, pool=pool)
    assert any(entry.name == "start_session" for entry in raised.traceback)
