"""Every episode that began is closed once, whatever ended it."""

import asyncio
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_game import RELEASE, Sandbox, noted, sandbox_tasks, wait_until

from agentsgym import Action, Agent, AsyncAgent, EnvError, EnvProcessPool, EnvThreadPool, ScriptedAgent, StopReason
from agentsgym.testing import chat_tokenizer


class Reader(Agent):
    """Answers the words of the prompt, one a turn."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        turn = agent_state or 0
        words = messages[-1]["content"].split()
        return words[turn % len(words)], turn + 1


class Silent(AsyncAgent):
    """Answers as :class:`Reader` does, and never to the word ``mute``."""

    async def aact(self, request: Any) -> Action:
        text, agent_state = Reader().get_action(request.messages, request.agent_state)
        while text == "mute":
            await asyncio.sleep(0.01)
        return Action(text=text, agent_state=agent_state)


@pytest.fixture
def sandbox(tmp_path: Path) -> Any:
    return lambda **config: Sandbox(None, {"log": str(tmp_path / "log"), "max_steps_per_episode": 4, **config})


@pytest.fixture(params=["here", "threads", "processes"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "here":
        yield None
    else:
        with (EnvThreadPool if request.param == "threads" else EnvProcessPool)(2) as pool:
            yield pool


def assert_all_closed(env: Sandbox, num_opened: int) -> None:
    wait_until(lambda: not env.active_states)  # a thread that comes late closes first, and forgets then
    opened, closed = noted(env)
    assert sum(opened.values()) == num_opened
    assert closed == opened
    assert env.active_states == {}


ENDS = ["a stop", "a b", "break", "fault", "a b c d e"]


def test_done_budgets_and_failures_close_an_episode_once(sandbox: Any, pool: Any) -> None:
    env = sandbox()
    played = env.rollout(sandbox_tasks(*ENDS, "unborn", "over"), Reader(), 2, pool=pool)
    reasons = [one.stop_reason.value for one in played[::2]]
    assert reasons == ["done", "max_turns", "failed", "failed", "max_turns", "failed", "failed"]
    # What raised in _initialize_episode never began; what began done is closed all the same.
    assert_all_closed(env, 2 * (len(ENDS) + 1))


@pytest.mark.parametrize("keep_history", [False, True])
def test_each_episode_of_a_trial_is_closed_before_the_next_begins(sandbox: Any, keep_history: bool) -> None:
    env = sandbox(episodes_per_trial=3, keep_history=keep_history)
    [trajectory] = env.rollout(sandbox_tasks("stop"), ScriptedAgent(["stop"], repeat_last=True))
    lines = Path(env.env_config["log"]).read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["open", "close"] * 3
    assert {line.split()[1] for line in lines} == {trajectory.session_id}


def test_a_trial_whose_next_episode_does_not_begin_closes_the_one_before_once(sandbox: Any) -> None:
    class Once(Sandbox):
        """Has one sandbox a session."""

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            if session_id in noted(self)[0]:
                raise OSError("no second one")
            return super()._initialize_episode(session_id, task_data)

    env = Once(None, sandbox(episodes_per_trial=2).env_config)
    [trajectory] = env.rollout(sandbox_tasks("stop"), Reader())
    assert "no second one" in (trajectory.error or "")
    assert_all_closed(env, 1)


def test_a_budget_of_tokens_closes_an_episode(sandbox: Any) -> None:
    env = Sandbox(chat_tokenizer("chatml"), sandbox(max_trajectory_tokens=30).env_config)
    [trajectory] = env.rollout(sandbox_tasks("a b c d e f"), Reader())
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert_all_closed(env, 1)


def test_too_many_invalid_actions_close_an_episode(tmp_path: Path) -> None:
    class Strict(Sandbox):
        """Calls every action invalid."""

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, _ = super()._step_episode(session_id, state, action)
            return state, reward, done, {"invalid": True}

    env = Strict(None, {"log": str(tmp_path / "log"), "error_allowance": 0})
    [trajectory] = env.rollout(sandbox_tasks("a b"), Reader())
    assert trajectory.stop_reason is StopReason.INVALID
    assert_all_closed(env, 1)


def test_an_agent_that_fails_closes_its_episode(sandbox: Any, pool: Any) -> None:
    env = sandbox()
    played = env.rollout(sandbox_tasks("a b", "a b"), ScriptedAgent(["a"]), pool=pool)
    assert [one.stop_reason for one in played] == [StopReason.FAILED] * 2
    assert_all_closed(env, 2)


class Interrupted(Reader):
    """Someone presses Ctrl-C while it thinks about its second turn."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        if agent_state == 1:
            raise KeyboardInterrupt
        return super().get_action(messages, agent_state)


@pytest.mark.parametrize("agent", [Reader(), Interrupted()], ids=["environment", "agent"])
def test_an_interrupt_closes_every_episode(sandbox: Any, agent: Agent) -> None:
    env = sandbox()
    with pytest.raises(KeyboardInterrupt):
        env.rollout(sandbox_tasks("stop", "a interrupt b", "a b"), agent, 2)
    assert_all_closed(env, 6)


@pytest.mark.parametrize("kind", [EnvThreadPool, EnvProcessPool])
def test_an_interrupt_closes_every_episode_of_a_pool(sandbox: Any, kind: Any) -> None:
    env = sandbox()
    with kind(2) as pool, pytest.raises(KeyboardInterrupt):
        env.rollout(sandbox_tasks("a b c", "a b"), Interrupted(), 2, pool=pool)
    assert_all_closed(env, 4)


def test_a_limit_of_time_closes_an_episode_here(sandbox: Any) -> None:
    env = sandbox()
    late, fine = env.rollout(sandbox_tasks("doze a", "a stop"), Reader(), turn_timeout_s=0.2)
    assert (late.failed, fine.failed) == (True, False)
    assert_all_closed(env, 2)


def test_an_agent_that_takes_too_long_closes_its_episode(sandbox: Any, pool: Any) -> None:
    env = sandbox()
    late, fine = env.rollout(sandbox_tasks("mute a", "a stop"), Silent(), pool=pool, turn_timeout_s=1)
    assert (late.failed, fine.failed) == (True, False)
    assert_all_closed(env, 2)


def test_a_step_that_is_given_up_in_a_thread_closes_its_episode_when_it_returns(sandbox: Any) -> None:
    env = sandbox()
    RELEASE.clear()
    with EnvThreadPool(2) as pool:
        late, fine = env.rollout(sandbox_tasks("hang a", "a stop"), Reader(), pool=pool, turn_timeout_s=0.2)
        opened, closed = noted(env)
        assert (late.failed, fine.failed) == (True, False)
        assert (opened - closed).keys() == {late.session_id}
        RELEASE.set()
    wait_until(lambda: noted(env)[0] == noted(env)[1])
    assert_all_closed(env, 2)


def test_a_process_that_is_ended_for_time_closes_all_that_lives_in_it(sandbox: Any) -> None:
    env = sandbox()
    with EnvProcessPool(1) as pool:
        scripts = sandbox_tasks("a sleep b", "a b stop", "a b c")
        late, *others = env.rollout(scripts, Reader(), pool=pool, turn_timeout_s=1)
    assert [late.failed, *(one.failed for one in others)] == [True, False, False]
    opened, closed = noted(env)
    assert closed == opened
    assert set(opened.values()) == {2}  # all three began again in the process that took the place of the first


def test_a_step_that_nothing_interrupts_is_killed_with_its_process(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentsgym.rollouts.workers.handle.GRACE_S", 0.3)
    env = sandbox()
    with EnvProcessPool(1) as pool:
        late, fine = env.rollout(sandbox_tasks("stubborn a", "a stop"), Reader(), pool=pool, turn_timeout_s=1)
    assert "the environment took longer than turn_timeout_s = 1" in (late.error or "")
    assert fine.stop_reason is StopReason.DONE
    opened, closed = noted(env)
    assert opened == {late.session_id: 2, fine.session_id: 2}
    assert closed == {late.session_id: 1, fine.session_id: 1}


def test_an_interrupt_closes_what_a_process_is_busy_with(sandbox: Any) -> None:
    def interrupt(_: Any) -> None:
        wait_until(lambda: "sleep" in Path(env.env_config["log"]).read_text())
        raise KeyboardInterrupt

    env = sandbox()
    with EnvProcessPool(2) as pool, pytest.raises(KeyboardInterrupt):
        env.rollout(sandbox_tasks("stop", "sleep", "a b c d"), Reader(), pool=pool, on_finish=interrupt)
    opened, closed = noted(env)
    assert closed == opened
    assert set(opened.values()) == {1}


def test_a_process_that_crashes_closes_nothing_and_what_is_replayed_is_closed(sandbox: Any) -> None:
    env = sandbox()
    with EnvProcessPool(1) as pool:
        crashed, fine = env.rollout(sandbox_tasks("a exit", "a b stop"), Reader(), pool=pool)
    assert "its environment's process died (exit code 7)" in (crashed.error or "")
    opened, closed = noted(env)
    assert opened == {crashed.session_id: 3, fine.session_id: 2}  # once alone, for proof, and once more for its end
    assert closed == {crashed.session_id: 1, fine.session_id: 1}


def test_an_exception_while_closing_is_logged_and_counted_and_changes_no_result(
    sandbox: Any, pool: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        leaky, fine = sandbox().rollout(sandbox_tasks("a stop leaky", "a stop fine"), Reader(), pool=pool)
    assert (leaky.stop_reason, leaky.turn_rewards, leaky.final_reward) == (StopReason.DONE, [1.0, 1.0], 2.0)
    assert (leaky.error, leaky.num_close_errors, fine.num_close_errors) == (None, 1, 0)
    if not isinstance(pool, EnvProcessPool):  # a worker's log is its own
        [record] = caplog.records
        first, *trace = record.getMessage().splitlines()
        place = rf"{re.escape(Sandbox._close_episode.__code__.co_filename)}:\d+"
        pattern = (
            rf"session {leaky.session_id} could not be closed: task 0, rollout 0, turn 1 of Sandbox, at {place}: "
            r"EnvError: Sandbox\._close_episode raised OSError: .*"
        )
        assert re.fullmatch(pattern, first)
        assert trace[0] == "Traceback (most recent call last):"
        assert [line for line in trace if "agentsgym/envs/trial.py" in line] == []
        assert record.exc_info is None


def test_every_episode_that_does_not_close_is_counted(sandbox: Any, caplog: pytest.LogCaptureFixture) -> None:
    env = sandbox(episodes_per_trial=3)
    caplog.clear()  # of the warning of episodes that are not recorded
    [trajectory] = env.rollout(sandbox_tasks("stop leaky"), ScriptedAgent(["stop"], repeat_last=True))
    assert trajectory.num_close_errors == 3
    first, rest = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        f"session {trajectory.session_id} could not be closed: task 0, rollout 0, episode 0, turn 0 of "
    )
    assert rest.startswith("… and 2 more of the same kind: task 0, rollout 0, episode 0, turn 0 of Sandbox, at ")


def test_the_trials_that_a_process_is_sent_share_one_log(sandbox: Any) -> None:
    here = sandbox().trials(sandbox_tasks("a", "b"))
    there = [pickle.loads(pickle.dumps(trial)) for trial in here]
    assert there[0].failures is there[1].failures
    assert here[0].failures is not here[1].failures


def test_a_single_episode_is_closed_too_and_its_state_stays(sandbox: Any) -> None:
    env = sandbox()
    for session_id, script in (("won", "a stop"), ("lost", "break")):
        env.active_states[session_id] = env._initialize_episode(session_id, {"script": script})
    env._run_complete_episode("won", Reader())
    with pytest.raises(EnvError, match="ZeroDivisionError"):
        env._run_complete_episode("lost", Reader())
    opened, closed = noted(env)
    assert opened == closed == {"won": 1, "lost": 1}
    assert env.active_states["won"]["played"] == ["a", "stop"]


def test_closing_comes_after_every_other_hook(sandbox: Any) -> None:
    class Ordered(Sandbox):
        """Notes what is called when it is over."""

        def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
            self._note("final", "reward")
            return 0.0

        def _calculate_rewards(self, trajectory: Any) -> list[float]:
            assert self.active_states[trajectory.session_id]["done"] is True
            self._note("token", "rewards")
            return [0.0] * len(trajectory.token_ids)

        def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
            assert state["done"] is True
            super()._close_episode(session_id, state)

    env = Ordered(None, sandbox().env_config)
    env.rollout(sandbox_tasks("stop"), Reader())
    words = [line.split()[0] for line in Path(env.env_config["log"]).read_text().splitlines()]
    assert words == ["open", "final", "token", "close"]
