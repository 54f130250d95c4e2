"""Agents that answer with coroutines, called from anywhere, and agents that are written or called in the wrong way."""

from __future__ import annotations

import asyncio
import re
import threading
from functools import partial
from typing import Any

import pytest
from guess_game import GuessEnv, tasks

from agentsgym import Action, Agent, AgentError, AsyncAgent, ConfigError, PolicyAgent, TurnRequest, tiny_policy
from agentsgym.agents.base import as_agent
from agentsgym.event_loop import agents_loop, run_coroutine


def requests(*names: str, agent_state: Any = None) -> list[TurnRequest]:
    return [TurnRequest(session_id=name, messages=[], token_ids=[], agent_state=agent_state) for name in names]


class Meeting(AsyncAgent):
    """Answers once as many sessions as it expects are waiting: one after the other it would wait forever."""

    def __init__(self, num_expected: int) -> None:
        self.num_expected = num_expected
        self.num_waiting = 0
        self.everyone = asyncio.Event()

    async def aact(self, request: TurnRequest) -> Action:
        self.num_waiting += 1
        if self.num_waiting == self.num_expected:
            self.everyone.set()
        await self.everyone.wait()
        return Action(text=request.session_id, agent_state=(request.agent_state or 0) + 1)


class Picky(AsyncAgent):
    """Raises for some sessions."""

    def __init__(self, errors: dict[str, BaseException]) -> None:
        self.errors = errors

    async def aact(self, request: TurnRequest) -> Action:
        await asyncio.sleep(0)
        if request.session_id in self.errors:
            raise self.errors[request.session_id]
        return Action(text=request.session_id)


def test_all_requests_wait_side_by_side_and_are_answered_in_order() -> None:
    answers = Meeting(3).act(requests("a", "b", "c", agent_state=4))
    assert answers == [Action(text=name, agent_state=5) for name in "abc"]
    assert Meeting(1).act([]) == []


def test_it_works_inside_a_running_event_loop() -> None:
    async def cell_of_a_notebook() -> Any:
        return Meeting(2).act(requests("a", "b")), Meeting(1).get_action([], None)

    assert asyncio.run(cell_of_a_notebook()) == ([Action(text=name, agent_state=1) for name in "ab"], ("", 1))


def test_what_one_session_raises_is_its_own_fault() -> None:
    first, second, third = Picky({"b": OSError("no route")}).act(requests("a", "b", "c"))
    assert (first, third) == (Action(text="a"), Action(text="c"))
    assert isinstance(second, AgentError)
    assert str(second) == "Picky.aact raised OSError: no route"
    assert second.trace.endswith("OSError: no route")


def test_a_client_that_cancels_itself_fails_one_session() -> None:
    first, second = Picky({"b": asyncio.CancelledError("scope left")}).act(requests("a", "b"))
    assert first == Action(text="a")
    assert "CancelledError: scope left" in str(second)


def test_a_config_error_is_raised_and_nothing_goes_on_running() -> None:
    class Never(Picky):
        """Does not come back to those that it can answer."""

        ended: list[str]

        async def aact(self, request: TurnRequest) -> Action:
            if request.session_id in self.errors:
                return await super().aact(request)
            try:
                return await asyncio.Future[Action]()
            finally:
                self.ended.append(request.session_id)

    agent = Never({"b": ConfigError("no such model")})
    agent.ended = []
    with pytest.raises(ConfigError, match="no such model"):
        agent.act(requests("a", "b", "c"))
    run_coroutine(asyncio.sleep(0))
    assert sorted(agent.ended) == ["a", "c"]


def test_all_calls_share_one_loop_on_a_thread_of_its_own() -> None:
    class Where(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            return Action(text="", agent_state=(threading.current_thread().name, asyncio.get_running_loop()))

    places = [Where().act(requests("a"))[0] for _ in range(2)]
    assert [place.agent_state for place in places] == [("agentsgym-agents", agents_loop())] * 2  # type: ignore[union-attr]


def test_calling_another_agent_from_a_coroutine_is_refused_with_await() -> None:
    class Nested(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            return Meeting(1).act([request])[0]  # type: ignore[return-value]

    (fault,) = Nested().act(requests("a"))
    assert "a coroutine of an agent or an environment must await another agent's aact" in str(fault)


def test_a_rollout_in_a_coroutine_is_refused_with_how_to_leave_the_loop_first() -> None:
    """It would wait for answers on the loop that it holds up."""

    class Planner(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            play = partial(GuessEnv().rollout, tasks(3), as_agent(Meeting(1)))
            (imagined,) = await asyncio.to_thread(play) if request.session_id == "away" else play()
            return Action(text=imagined.stop_reason)

    fault, action = Planner().act(requests("here", "away"))
    assert "await asyncio.to_thread(env.rollout, …)" in str(fault)
    assert isinstance(action, Action)


def test_any_object_with_aact_is_adapted() -> None:
    class Client:
        finished = 0

        async def aact(self, request: TurnRequest) -> Action:
            return Action(text=request.session_id * 2)

        def finish(self) -> None:
            self.finished += 1

    client = Client()
    agent = as_agent(client)
    assert isinstance(agent, AsyncAgent)
    assert agent.act(requests("a", "b")) == [Action(text="aa"), Action(text="bb")]
    agent.finish()
    assert client.finished == 1


def test_an_agent_that_only_adds_aact_answers_with_it() -> None:
    class Mine(Agent):
        async def aact(self, request: TurnRequest) -> Action:
            raise OSError("down")

    (fault,) = as_agent(Mine()).act(requests("a"))
    assert str(fault) == "Mine.aact raised OSError: down"


def test_an_async_agent_is_taken_as_it_is() -> None:
    agent = Meeting(1)
    assert as_agent(agent) is agent
    with pytest.raises(ConfigError, match="an agent must define"):
        as_agent(Meeting)


def test_an_async_agent_must_define_aact() -> None:
    (fault,) = AsyncAgent().act(requests("a"))
    assert "AsyncAgent must define aact" in str(fault)


REQUEST = TurnRequest(session_id="s", messages=[], token_ids=())


def test_an_agent_that_answers_requests_shows_how_it_is_played() -> None:
    agent = PolicyAgent(*tiny_policy(["Guess"]))
    sentence = (
        "PolicyAgent does not implement get_action, since it works on token ids: "
        "call env.rollout(tasks, agent) or evaluate(env, agent, tasks) with an environment that has a tokenizer"
    )
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        agent.get_action([{"role": "user", "content": "hello"}], None)


def test_an_agent_without_any_answer_names_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="Agent must define get_action or act"):
        Agent().get_action([], None)


@pytest.mark.parametrize("base", [Agent, AsyncAgent])
@pytest.mark.parametrize("name", ["get_action", "act"])
def test_a_coroutine_where_none_is_awaited_is_refused_with_the_class(base: type[Agent], name: str) -> None:
    async def answer(self: Any, *arguments: Any) -> Any:
        return "hello", None

    with pytest.raises(ConfigError, match=rf"Mine\.{name} is async, and only aact is awaited: .*AsyncAgent"):
        type("Mine", (base,), {name: answer})


def test_any_object_whose_get_action_is_a_coroutine_is_refused() -> None:
    class Foreign:
        """No agent of ours."""

        async def get_action(self, messages: Any, agent_state: Any) -> Any:
            return "hello", agent_state

    with pytest.raises(ConfigError, match=r"Foreign\.get_action is async, and only aact is awaited"):
        as_agent(Foreign())


@pytest.mark.parametrize("function", [lambda messages: "yes", partial(str.join, " "), len])
def test_a_bare_function_in_place_of_an_agent_names_the_agent_that_takes_one(function: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"an agent must define .*: for a function of the messages .*, use DirectOutputAgent\(function\)",
    ):
        as_agent(function)


@pytest.mark.parametrize("base", [object, Agent, AsyncAgent])
def test_a_class_in_place_of_an_agent_is_refused_with_what_to_write(base: type[Any]) -> None:
    mine = type("Mine", (base,), {"get_action": lambda self, messages, agent_state: ("hello", agent_state)})
    with pytest.raises(ConfigError, match=r"an agent must define .*; got the class Mine: pass an instance, Mine\(\)$"):
        as_agent(mine)


@pytest.mark.parametrize("base", [object, Agent])
def test_a_get_action_that_returns_a_coroutine_hears_of_aact(base: type[Any]) -> None:
    async def later() -> Any:
        return "hello", None

    mine = type("Mine", (base,), {"get_action": lambda self, messages, agent_state: later()})
    (failure,) = as_agent(mine()).act([REQUEST])
    assert str(failure) == (
        "Mine.get_action returned a coroutine, and only aact is awaited: subclass agentsgym.AsyncAgent and write "
        "async def aact(self, request) -> Action"
    )


class Raising(Agent):
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        raise self.error


def test_an_agent_that_cannot_play_at_all_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="the key is refused"):
        Raising(ConfigError("the key is refused")).act([REQUEST])


def test_what_get_action_raises_fails_its_session_with_the_users_line() -> None:
    (failure,) = Raising(OSError("no route")).act([REQUEST])
    assert isinstance(failure, AgentError)
    assert str(failure) == "Raising.get_action raised OSError: no route"
    assert failure.place == f"{__file__}:{Raising.get_action.__code__.co_firstlineno + 1}"
    assert failure.trace.endswith("OSError: no route")
