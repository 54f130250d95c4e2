"""Agents that answer with coroutines, called from sync code and from inside a running event loop."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from guess_game import GuessEnv, tasks

from agentsgym import Action, Agent, AgentError, AsyncAgent, ConfigError, TurnRequest
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
