"""What is played does not depend on how the agent is called or where the environment runs; limits of time."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from bare_trials import drive
from hypothesis import given
from hypothesis import strategies as st
from playground import AsyncParrot, AsyncPlayground, Parrot, Playground, recent, tasks, texts

from agentsgym.agents.base import AsyncAgent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.TwentyQuestions.env import TwentyQuestionsEnv
from agentsgym.errors import AgentError, ConfigError, EnvError
from agentsgym.event_loop import agents_loop
from agentsgym.interruptions import Interruption
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, StopReason, Trajectory, TurnRequest

TOKENIZER = chat_tokenizer()
SCRIPTS = ("a b c stop", "a stop", "a break c", "x y z", "stop")
LONG = {"turn_timeout_s": 100, "episode_timeout_s": 200}


@pytest.fixture(scope="module")
def processes() -> Iterator[EnvProcessPool]:
    with EnvProcessPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def threads() -> Iterator[EnvThreadPool]:
    with EnvThreadPool(3) as pool:
        yield pool


@pytest.fixture(params=["here", "threads", "processes"])
def pool(request: pytest.FixtureRequest) -> Any:
    return None if request.param == "here" else request.getfixturevalue(request.param)


def anonymous(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Without what differs between any two runs: the sessions' names, and where in our own code a fault passed."""
    return [
        dataclasses.replace(one, session_id="", error=one.error and one.error.splitlines()[-1]) for one in trajectories
    ]


@pytest.mark.parametrize("env_class", [Playground, AsyncPlayground])
@pytest.mark.parametrize("make_agent", [Parrot, AsyncParrot])
@pytest.mark.parametrize("limits", [{}, LONG])
@pytest.mark.parametrize("max_concurrent", [None, 2])
@pytest.mark.parametrize(
    "config",
    [{}, {"episodes_per_trial": 2}, {"episodes_per_trial": 2, "keep_history": True}, {"history": recent}],
    ids=["episode", "trial", "kept", "rewritten"],
)
def test_requests_and_trajectories_are_the_same_in_all_modes(
    config: Any,
    max_concurrent: int | None,
    limits: Any,
    make_agent: Callable[[], Any],
    env_class: type[Playground],
    pool: Any,
) -> None:
    config = {"max_steps_per_episode": 4, **config}
    env, plain, agent = env_class(TOKENIZER, config), Parrot(), make_agent()
    wanted = Playground(TOKENIZER, config).rollout(
        tasks(*SCRIPTS), plain, 2, max_turn_tokens=9, max_completion_length=300
    )
    seen: list[Trajectory] = []
    given = env.rollout(
        tasks(*SCRIPTS),
        agent,
        2,
        max_turn_tokens=9,
        max_completion_length=300,
        max_concurrent=max_concurrent,
        on_finish=seen.append,
        pool=pool,
        **limits,
    )
    assert anonymous(given) == anonymous(wanted)
    assert sorted(map(id, seen)) == sorted(map(id, given))
    assert sorted(map(repr, agent.requested)) == sorted(map(repr, plain.requested))
    assert agent.finished == 1
    assert not env.active_states


@pytest.mark.parametrize("env_class", [Playground, AsyncPlayground])
def test_a_batch_agent_is_called_once_a_round_in_all_modes(pool: Any, env_class: type[Playground]) -> None:
    agent = Parrot()
    env_class().rollout(tasks("a b stop", "a stop", "a b c stop"), agent, pool=pool)
    assert agent.rounds == [3, 3, 2, 1]


def test_twenty_questions_in_all_modes(pool: Any) -> None:
    env = TwentyQuestionsEnv(TOKENIZER, {"max_steps_per_episode": 3})
    agent = ScriptedAgent(["Is it an animal?", "Is it a clock?"], repeat_last=True)
    games = [{"solution": solution, "seed": 1} for solution in ("clock", "dog", "piano")]
    wanted = env.rollout(games, agent, 2)
    assert anonymous(env.rollout(games, agent, 2, pool=pool)) == anonymous(wanted)
    assert [one.success for one in wanted] == [True, True, False, False, False, False]


@given(st.lists(st.integers(0, 5), max_size=8), st.none() | st.integers(1, 4), st.integers(0, 3))
def test_coroutines_in_any_order_answer_their_own_episodes(lengths: list[int], limit: int | None, modulus: int) -> None:
    class Dawdling(Counted):
        async def aact(self, request: TurnRequest) -> Action:
            for _ in range(int(request.session_id) % (modulus + 1)):
                await asyncio.sleep(0)
            return await super().aact(request)

    agent, seen = Dawdling(), []
    episodes = [counting(n, length) for n, length in enumerate(lengths)]
    results = drive(episodes, agent, max_concurrent=limit, on_finish=seen.append)
    assert results == [[f"{n}.{turn}" for turn in range(length)] for n, length in enumerate(lengths)]
    assert sorted(seen) == sorted(results)
    assert agent.most <= (limit or len(lengths))


class Counted(AsyncAgent):
    """Reports which turn of which session it is, and counts those that requests at a time."""

    live = most = 0

    async def aact(self, request: TurnRequest) -> Action:
        self.live += 1
        self.most = max(self.most, self.live)
        await asyncio.sleep(0)
        self.live -= 1
        return Action(text=f"{request.session_id}.{request.token_ids[0]}")


def counting(number: int, length: int) -> Generator[TurnRequest, Action, list[str]]:
    reported: list[str] = []
    for turn in range(length):
        reported.append((yield TurnRequest(session_id=str(number), messages=[], token_ids=[turn])).text)
    return reported


def test_an_episode_need_not_wait_for_a_slow_answer_to_another(pool: Any) -> None:
    """In lockstep the quick episode would wait for the slow one's first answer, and that for the quick one's end."""
    is_over = asyncio.Event()

    class Uneven(AsyncParrot):
        async def aact(self, request: TurnRequest) -> Action:
            if request.messages[0]["content"].startswith("slow"):
                await is_over.wait()
            return await super().aact(request)

    seen: list[Trajectory] = []

    def note(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        agents_loop().call_soon_threadsafe(is_over.set)

    slow, quick = Playground().rollout(tasks("slow stop", "a b c d stop"), Uneven(), pool=pool, on_finish=note)
    assert seen == [quick, slow]


def test_it_works_inside_a_running_event_loop(pool: Any) -> None:
    async def cell_of_a_notebook() -> list[Trajectory]:
        return Playground().rollout(tasks("a stop"), AsyncParrot(), pool=pool)

    [trajectory] = asyncio.run(cell_of_a_notebook())
    assert texts(trajectory) == ["a", "stop"]


@pytest.mark.parametrize("make_agent", [Parrot, AsyncParrot])
def test_an_error_in_on_finish_ends_the_run_and_leaves_the_pool_usable(make_agent: Any, pool: Any) -> None:
    env, agent, seen = Playground(), make_agent(), []

    def interrupt(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        env.rollout(tasks("stop", "a b c d e f stop", "mute"), agent, on_finish=interrupt, pool=pool)
    (first,) = [texts(one) for one in seen]
    assert first in (["stop"], [*"abcdef", "stop"])  # a worker may be slow to start
    assert not env.active_states
    assert agent.finished == 1
    assert [texts(one) for one in env.rollout(tasks("a stop", "stop"), make_agent(), pool=pool)] == [
        ["a", "stop"],
        ["stop"],
    ]


@pytest.mark.parametrize("error", [ConfigError, Interruption, KeyboardInterrupt])
def test_what_is_no_sessions_fault_in_a_coroutine_ends_the_run(error: Any, pool: Any) -> None:
    class Ending(AsyncParrot):
        async def aact(self, request: TurnRequest) -> Action:
            answer = await super().aact(request)
            while answer.text == "end":
                await asyncio.sleep(0.001)
                if any(messages[-1]["content"] == "mute" for messages, *_ in self.requested):
                    raise error("enough")
            return answer

    env, agent = Playground(), Ending()
    with pytest.raises(error, match="enough"):
        env.rollout(tasks("mute", "a end", "a b c d e f g"), agent, pool=pool)
    assert agent.finished == len(agent.cancelled) == 1
    assert not env.active_states


def test_a_coroutine_that_raises_fails_its_own_session(pool: Any) -> None:
    class Weak(AsyncParrot):
        async def aact(self, request: TurnRequest) -> Action:
            answer = await super().aact(request)
            if answer.text == "weak":
                raise OSError("no route")
            return answer

    first, second = Playground().rollout(tasks("a weak", "a b stop"), Weak(), pool=pool)
    assert (first.stop_reason, texts(first)) == (StopReason.FAILED, ["a"])
    assert "OSError: no route" in str(first.error)
    assert second.stop_reason is StopReason.DONE


def test_nonsense_instead_of_an_action_is_the_agents_fault(pool: Any) -> None:
    class Nonsense(AsyncParrot):
        async def aact(self, request: TurnRequest) -> Any:
            return None if request.messages[0]["content"] == "x" else await super().aact(request)

    first, second = Playground().rollout(tasks("x", "stop"), Nonsense(), pool=pool)
    assert "an agent must return an Action, got None" in str(first.error)
    assert second.stop_reason is StopReason.DONE


def test_any_fault_instead_of_an_action_is_thrown_into_its_episode(pool: Any) -> None:
    class Blaming(Parrot):
        def answer(self, request: TurnRequest) -> Any:
            return EnvError("no such room") if request.messages[0]["content"] == "x" else super().answer(request)

    first, second = Playground().rollout(tasks("x", "stop"), Blaming(), pool=pool)
    assert str(first.error).splitlines()[-1].endswith("EnvError: no such room")
    assert second.stop_reason is StopReason.DONE


def test_an_answer_that_does_not_come_in_time_fails_its_own_session(pool: Any) -> None:
    agent = AsyncParrot()
    late, other = Playground().rollout(tasks("a mute", "a b stop"), agent, pool=pool, turn_timeout_s=1)
    assert (late.stop_reason, texts(late)) == (StopReason.FAILED, ["a"])
    wanted = f"AgentError: session {late.session_id}, turn 1: the agent took longer than turn_timeout_s = 1"
    assert str(late.error).splitlines()[-1].endswith(wanted)
    assert other.stop_reason is StopReason.DONE
    assert agent.cancelled == [late.session_id]


def test_a_trajectory_bears_its_task_and_seed_also_where_it_was_given_up(pool: Any) -> None:
    games = [{**task, "seed": 5} for task in tasks("a stop", "a mute")]
    done, late = Playground().rollout(games, AsyncParrot(), pool=pool, turn_timeout_s=1)
    assert [done.task_data, late.task_data] == games
    assert (done.seed, late.seed) == (5, 5)
    [unseeded] = Playground().rollout([{"script": "stop"}], Parrot(), pool=pool)
    assert unseeded.task_data == {"script": "stop", "seed": unseeded.seed}
    assert isinstance(unseeded.seed, int)


def test_an_answer_in_time_is_not_late_because_other_steps_took_long() -> None:
    """On one thread, answers come in while steps of other sessions run."""
    played = Playground().rollout(tasks(*["doze doze doze stop"] * 10), AsyncParrot(), turn_timeout_s=0.3)
    assert [one.stop_reason for one in played] == [StopReason.DONE] * 10


def test_an_episode_that_waits_too_long_for_its_answer_fails(pool: Any) -> None:
    late, other = Playground().rollout(tasks("a mute", "a b stop"), AsyncParrot(), pool=pool, episode_timeout_s=1.5)
    assert (late.stop_reason, texts(late)) == (StopReason.FAILED, ["a"])
    wanted = f"session {late.session_id}, turn 1: the trial took longer than episode_timeout_s = 1.5"
    assert str(late.error).splitlines()[-1].endswith(wanted)
    assert other.stop_reason is StopReason.DONE


def test_without_a_pool_a_slow_step_is_noticed_when_it_returns() -> None:
    env = Playground()
    late, ended, other = env.rollout(tasks("a doze b", "doze stop", "a stop"), Parrot(), turn_timeout_s=0.04)
    for one in (late, ended):
        assert one.stop_reason is StopReason.FAILED
        assert "the environment took longer than turn_timeout_s = 0.04" in str(one.error)
    assert (texts(late), [turn.reward for turn in late.turns]) == (["a", "doze"], [1.0, 4.0])
    assert other.stop_reason is StopReason.DONE
    assert not env.active_states


def test_a_slow_batch_counts_for_the_episode_but_not_for_the_turn() -> None:
    class Slow(Parrot):
        def act(self, requests: Any) -> Any:
            threading.Event().wait(0.05)
            return super().act(requests)

    [in_time] = Playground().rollout(tasks("a stop"), Slow(), turn_timeout_s=0.04)
    assert in_time.stop_reason is StopReason.DONE
    [late] = Playground().rollout(tasks("a b c d e f stop"), Slow(), episode_timeout_s=0.12)
    assert "the trial took longer than episode_timeout_s = 0.12" in str(late.error)
    assert 1 <= len(late.turns) <= 3


def test_a_fault_is_thrown_into_a_generator_that_may_go_on() -> None:
    def stubborn() -> Generator[TurnRequest, Action, str]:
        while True:
            try:
                return (yield TurnRequest(session_id="x", messages=[], token_ids=[0])).text
            except AgentError:
                pass

    class Twice(Counted):
        num_requested = 0

        async def aact(self, request: TurnRequest) -> Action:
            self.num_requested += 1
            if self.num_requested == 1:
                raise OSError
            return await super().aact(request)

    assert drive([stubborn()], Twice()) == ["x.0"]


@pytest.mark.parametrize("name", ["turn_timeout_s", "episode_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, "1", True])
def test_a_limit_that_is_no_time_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive number of seconds or None, got {value!r}"):
        Playground().rollout(tasks("stop"), Parrot(), **{name: value})
