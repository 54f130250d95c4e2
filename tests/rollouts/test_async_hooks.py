"""Hooks that are coroutines: all sessions wait together, a limit of time cancels them, and every episode is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from guess_game import Quiet
from playground import AsyncParrot, AsyncPlayground, Parrot, Playground, tasks, texts

from agentsgym import (
    Action,
    AsyncAgent,
    ConfigError,
    EnvThreadPool,
    MultistepEnv,
    ScriptedAgent,
    TurnRequest,
    check_env,
)
from agentsgym.envs.Tools import SessionTools, ToolEnv
from agentsgym.event_loop import agents_loop, is_on_agents_loop
from agentsgym.interruptions import Interruption
from agentsgym.rollouts.driver import TrialStream, drive
from agentsgym.types import StopReason, ToolCall, Trajectory

LIMIT_S = 60.0  # for what ends at once unless it hangs


class Together(MultistepEnv):
    """Each step waits until ``size`` sessions wait in it, so a run that waits for one after another never ends."""

    size = 50
    num_waiting = 0
    is_full: ClassVar[asyncio.Event]
    off_the_loop = 0

    async def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        self.off_the_loop += not is_on_agents_loop()
        return "go"

    async def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if self.num_waiting % self.size == 0:
            type(self).is_full = asyncio.Event()
        is_full = type(self).is_full
        self.num_waiting += 1
        if self.num_waiting % self.size == 0:
            is_full.set()
        await is_full.wait()
        return state, 1.0, self.num_waiting == 2 * self.size, {}


@pytest.mark.parametrize("make_agent", [Parrot, AsyncParrot])
@pytest.mark.parametrize("limits", [{}, {"turn_timeout_s": LIMIT_S}])
def test_all_sessions_wait_together_on_one_loop(make_agent: Any, limits: Any) -> None:
    env = Together(env_config={"max_steps_per_episode": 2})
    played = env.rollout([{}] * env.size, make_agent(), **limits)
    assert [len(one.turns) for one in played] == [2] * env.size
    assert not env.off_the_loop, "hooks that are not async run on the loop, too, and never overlap"


def test_a_step_that_takes_too_long_is_cancelled_and_its_episode_closed() -> None:
    env = AsyncPlayground()
    played = env.rollout(tasks("a wait b stop", "a b stop", "wait"), Parrot(), turn_timeout_s=0.3)
    assert [one.stop_reason for one in played] == [StopReason.FAILED, StopReason.DONE, StopReason.FAILED]
    assert "the environment took longer than turn_timeout_s = 0.3" in str(played[0].error)
    assert texts(played[0]) == ["a", "wait"]
    assert sorted(env.interrupted) == sorted([played[0].session_id, played[2].session_id])
    assert sorted(env.closed) == sorted(one.session_id for one in played)
    assert not env.active_states


def test_a_trial_that_takes_too_long_is_cancelled() -> None:
    env = AsyncPlayground()
    played = env.rollout(tasks("a wait", "a stop"), AsyncParrot(), episode_timeout_s=0.3)
    assert "the trial took longer than episode_timeout_s = 0.3" in str(played[0].error)
    assert env.interrupted == [played[0].session_id]
    assert sorted(env.closed) == sorted(one.session_id for one in played)


class Stubborn(AsyncPlayground):
    """Goes on when its step is cancelled."""

    async def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        try:
            return await super()._step_episode(session_id, state, action)
        except asyncio.CancelledError:
            return state, 0.0, False, {}


def test_a_step_that_catches_its_cancellation_ends_all_the_same() -> None:
    env = Stubborn()
    [played] = env.rollout(tasks("wait"), Parrot(), turn_timeout_s=0.2)
    assert played.failed
    assert len(played.turns) == 0 or texts(played) == ["wait"]
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), agents_loop()).result()
    assert env.closed == [played.session_id]


def test_an_error_in_a_coroutine_fails_its_own_episode_with_its_place() -> None:
    class Failing(AsyncPlayground):
        async def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            await asyncio.sleep(0)
            if action == "raise":
                raise ValueError("of the world")
            return await super()._step_episode(session_id, state, action)

    played = Failing().rollout(tasks("a raise", "a stop"), Parrot())
    assert [one.failed for one in played] == [True, False]
    assert "Failing._step_episode raised ValueError: of the world" in str(played[0].error)
    assert f"{__file__}:" in str(played[0].error)


@pytest.mark.parametrize("make_agent", [Parrot, AsyncParrot])
def test_an_interruption_cancels_what_waits_and_closes_every_episode(make_agent: Any) -> None:
    class Stop(Interruption):
        pass

    env, checks = AsyncPlayground(), iter(range(1000))
    trials = env.trials([{"task_data": task} for task in tasks("a wait", "a b c d e", "wait", "a wait")])

    def begun() -> set[str]:
        return {one.session_id for one in trials if one.place[1] is not None and one.conversation.transcript.messages}

    def interrupt() -> None:
        if begun() and next(checks) == 5:
            raise Stop

    with pytest.raises(Stop):
        drive(trials, make_agent(), interrupt=interrupt, max_concurrent=3)
    assert begun() <= set(env.closed)
    assert not env.active_states


TERMINATED = """
import sys
from agentsgym.interruptions import Terminated, raising_on_sigterm
from playground import AsyncPlayground, Parrot, tasks

class Waiting(AsyncPlayground):
    async def _step_episode(self, *arguments):
        print("waiting", flush=True)
        return await super()._step_episode(*arguments)

env = Waiting()
try:
    with raising_on_sigterm():
        env.rollout(tasks("wait", "wait", "wait"), Parrot())
except Terminated:
    print(len(env.interrupted), len(env.closed), flush=True)
    sys.exit(3)
"""


def test_sigterm_cancels_what_waits_and_closes_every_episode() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "3 3\n"
        assert process.wait(LIMIT_S) == 3


def test_environments_with_and_without_coroutines_play_in_one_run() -> None:
    waiting, plain = AsyncPlayground(), Playground()
    scripts = [{"task_data": task} for task in tasks("a b stop", "a stop")]
    played = drive([*waiting.trials(scripts), *plain.trials(scripts)], Parrot())
    assert [texts(one) for one in played] == [["a", "b", "stop"], ["a", "stop"]] * 2


def test_a_pool_waits_in_its_threads() -> None:
    with EnvThreadPool(2) as pool:
        played = AsyncPlayground().rollout(tasks("a stop", "b c stop", "d stop"), Parrot(), pool=pool)
    assert [texts(one)[-1] for one in played] == ["stop"] * 3


class Mentor(AsyncAgent):
    """Answers in capital letters, and counts how many wait at once."""

    num_waiting = most = 0

    async def aact(self, request: TurnRequest) -> Action:
        self.num_waiting += 1
        self.most = max(self.most, self.num_waiting)
        await asyncio.sleep(0.01)
        self.num_waiting -= 1
        return Action(text=request.messages[-1]["content"].upper())


def yes() -> TurnRequest:
    return TurnRequest(session_id="mentor", messages=[{"role": "user", "content": "yes"}], token_ids=[])


def test_a_hook_may_call_an_agent() -> None:
    mentor = Mentor()

    class Awaiting(Playground):
        async def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            answer = await mentor.aact(yes())
            return {**super()._initialize_episode(session_id, task_data), "script": answer.text}

    class Calling(AsyncPlayground):
        def _potential(self, state: dict[str, Any]) -> float:
            [answer] = mentor.act([yes()])
            return float(len(answer.text))

    played = Awaiting().rollout(tasks(*["a"] * 8), Parrot())
    assert {texts(one)[0] for one in played} == {"YES"}
    assert mentor.most == 8
    mentor.most = 0
    played = Calling().rollout(tasks(*["stop"] * 8), Parrot())
    assert [one.turns[0].potential for one in played] == [3.0] * 8
    assert mentor.most == 8, "a call that is not awaited leaves the loop to the other sessions, too"


def test_a_coroutine_that_calls_an_agent_without_awaiting_it_fails_with_a_sentence() -> None:
    class Blocking(AsyncPlayground):
        async def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            Mentor().act([yes()])

    [played] = Blocking().rollout(tasks("a"), Parrot())
    assert "must await another agent's aact instead of calling its act" in str(played.error)


def test_an_episode_by_hand_and_the_checks_await_hooks() -> None:
    env = AsyncPlayground()
    [message] = env.reset({"script": "a stop"})
    assert message["content"] == "a stop"
    assert env.step("stop")[2]
    assert len(env.closed) == 1
    report = check_env(AsyncPlayground(), tasks("a b stop"))
    assert not [one for one in report.findings if one.severity == "error"], report


def test_a_stream_of_trials_awaits_hooks() -> None:
    env, results, done = AsyncPlayground(), list[Trajectory](), threading.Event()

    def note(trajectory: Trajectory) -> None:
        results.append(trajectory)
        if len(results) == 3:
            done.set()

    stream = TrialStream(AsyncParrot(), on_finish=note, max_concurrent=2)
    stream.add(env.trials([{"task_data": task} for task in tasks("a stop", "b stop", "c stop", "wait")]))
    assert done.wait(LIMIT_S)
    stream.close()
    assert sorted(texts(one)[0] for one in results) == ["a", "b", "c"]
    assert len(env.interrupted) == 1
    assert len(env.closed) == 4


@pytest.mark.parametrize("hook", ["_check_task", "_check_config", "_prepare_play"])
def test_a_hook_that_is_not_awaited_is_rejected_with_its_class(hook: str) -> None:
    async def waiting(self: Any, *arguments: Any) -> None: ...

    with pytest.raises(ConfigError, match=rf"Mine\.{hook} is async, but this hook is not awaited: .*_step_episode"):
        type("Mine", (Playground,), {hook: waiting})


# Tools


class Lines(AsyncAgent):
    """Calls the tools of its list, a turn each, then answers."""

    def __init__(self, *names: str) -> None:
        self.names = names

    async def aact(self, request: TurnRequest) -> Action:
        turn = request.agent_state or 0
        calls = [ToolCall(name=self.names[turn], arguments={})] if turn < len(self.names) else []
        return Action(text="" if calls else "done", tool_calls=calls, agent_state=turn + 1)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"Question {n}?"} for n in range(count)]


def results_of(played: Sequence[Trajectory]) -> list[str]:
    return [message["content"] for one in played for message in one.messages if message["role"] == "tool"]


def test_async_tools_of_all_sessions_wait_together() -> None:
    waiting, event = [0], list[asyncio.Event]()

    async def meet() -> str:
        """Wait for the others."""
        if not waiting[0]:
            event.append(asyncio.Event())
        waiting[0] += 1
        if waiting[0] == 20:
            event[0].set()
        await event[0].wait()
        return "met"

    def plain() -> str:
        """Tell who runs this."""
        return "on the loop" if is_on_agents_loop() else "in a thread"

    played = ToolEnv(tools=[meet, plain]).rollout(questions(20), Lines("meet", "plain"), turn_timeout_s=LIMIT_S)
    assert results_of(played) == ["met", "in a thread"] * 20


def test_an_async_tool_that_takes_too_long_is_cancelled() -> None:
    cancelled = list[bool]()

    async def hang() -> str:
        """Wait for nothing."""
        try:
            await asyncio.Future[None]()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    async def own_limit() -> str:
        """Have an error of its own."""
        raise TimeoutError("of the tool")

    env = ToolEnv(env_config={"tool_timeout_s": 0.1}, tools=[hang, own_limit])
    played = env.rollout(questions(2), Lines("hang", "own_limit"))
    assert cancelled == [True, True]
    assert results_of(played)[0].endswith("hang took longer than 0.1 s, and was given up")
    assert "of the tool" in results_of(played)[1]


def test_methods_of_a_sessions_object_and_rewards_may_be_async() -> None:
    class Counter:
        def __init__(self, task: dict[str, Any], generator: Any) -> None:
            self.count = 0

        async def increase(self) -> int:
            """Count."""
            await asyncio.sleep(0)
            self.count += 1
            return self.count

    class Counting(ToolEnv):
        async def _reward_call(self, state: Any, call: ToolCall, result: Any) -> float:
            await asyncio.sleep(0)
            return float(result.content)

        async def _reward_answer(self, state: Any, text: str) -> Any:
            await asyncio.sleep(0)
            return {"polite": 0.5}

    played = Counting(tools=SessionTools(tools_class=Counter)).rollout(questions(3), Lines("increase", "increase"))
    assert [[turn.reward for turn in one.turns] for one in played] == [[1.0, 2.0, 0.5]] * 3
    assert [one.final_components for one in played] == [{"reward": 3.0, "polite": 0.5}] * 3


class FailsDeepInside(Quiet):
    """A hook whose coroutine raises in another coroutine."""

    async def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        await _raises_after_a_moment()


async def _raises_after_a_moment() -> None:
    await asyncio.sleep(0)
    raise ValueError("deep inside")


def test_the_error_of_a_coroutine_has_its_whole_traceback() -> None:
    [one] = FailsDeepInside().rollout([{}], ScriptedAgent(["a"]))
    assert one.error is not None
    assert "in _step_episode" in one.error
    assert "in _raises_after_a_moment" in one.error
    assert one.error.endswith("ValueError: deep inside")
