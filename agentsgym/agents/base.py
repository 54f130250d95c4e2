"""The base classes of agents, which answer turns."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from typing import Any, cast

from agentsgym.agents.event_loop import run_coroutine
from agentsgym.errors import AgentError, ConfigError
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.types import Action, Message, TurnRequest

_TO_WRITE = "only aact is awaited: subclass agentsgym.AsyncAgent and write async def aact(self, request) -> Action"


def _refuse_coroutines(cls: type) -> None:
    """Raise :class:`ConfigError` for a class whose ``get_action`` or ``act`` would return a coroutine."""
    for name in ("get_action", "act"):
        if inspect.iscoroutinefunction(getattr(cls, name, None)):
            raise ConfigError(f"{cls.__name__}.{name} is async, and {_TO_WRITE}")


class Agent:
    """Answers turns, one conversation at a time or many at once.

    A simple agent defines :meth:`get_action`; one that gains from batches defines :meth:`act`. Neither tokenizes for
    training: an agent returns the ids that it sampled, or only text.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_coroutines(cls)

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Answer one turn.

        Args:
            messages: The conversation so far, ending with the new observation; must not be changed.
            agent_state: The state of this conversation that this agent returned last; None at first.

        Returns:
            The answer, and the ``agent_state`` of the next turn.
        """
        name = type(self).__name__
        if type(self).act is not Agent.act:
            raise NotImplementedError(
                f"{name} has no get_action: it is called through {name}.act, with token ids: use env.rollout(tasks, "
                "agent) or evaluate(env, agent, tasks), with an environment that has a tokenizer"
            )
        raise NotImplementedError(f"{name} must define get_action or act")

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer one turn of many sessions, in the order of ``requests``.

        A session that cannot be answered gets an :class:`AgentError` in place of its action, and the others play on.
        """
        return [self._answer(request) for request in requests]

    def finish(self) -> None:
        """Free the resources of the episodes, all of which have ended."""

    def _answer(self, request: TurnRequest) -> Action | AgentError:
        try:
            answer: Any = self.get_action(request.messages, request.agent_state)  # type: ignore[arg-type]  # a live list
        except ConfigError:
            raise  # no episode can be played
        except BaseException as error:  # foreign code: one agent's error is one failed episode
            if is_interruption(error):
                raise
            return failure_of(AgentError, f"{_class_name(self)}.get_action", error, self.get_action)
        if inspect.iscoroutine(answer):
            answer.close()  # else Python warns that it was never awaited
            return AgentError(f"{_class_name(self)}.get_action returned a coroutine, and {_TO_WRITE}")
        pair = cast("tuple[Any, ...]", answer if isinstance(answer, tuple) else ())
        if len(pair) != 2 or not isinstance(pair[0], str):
            return AgentError(
                f"{_class_name(self)}.get_action must return (text, agent_state), got {shown(cast('object', answer))}"
            )
        return Action(text=pair[0], agent_state=pair[1])


class AsyncAgent(Agent):
    """Answers each turn with a coroutine, so that many sessions wait for their answers at once.

    A subclass defines :meth:`aact`. An environment's ``rollout`` then runs every episode at its own pace: its next
    request is sent when its own step is done. All coroutines of all agents run on one event loop, which the library
    owns and which lives as long as the process: clients and locks may be kept from one rollout to the next, and a
    coroutine that blocks holds up all sessions.
    """

    async def aact(self, request: TurnRequest) -> Action:
        """Answer one turn of one session; an exception fails that session, a :class:`ConfigError` ends the run."""
        raise NotImplementedError(f"{type(self).__name__} must define aact")

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer all requests concurrently; to be called from outside the agents' event loop.

        Raises:
            ConfigError: The agent cannot play here at all.
        """
        return run_coroutine(_answer_all(self, requests)) if requests else []

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Answer one turn as text."""
        request = TurnRequest(session_id="", messages=messages, token_ids=(), agent_state=agent_state)
        action = run_coroutine(self.aact(request))
        return action.text, action.agent_state


async def answer(agent: Any, request: TurnRequest) -> Action | AgentError:
    """Await an agent's ``aact``; an exception fails the session that is answered.

    Raises:
        ConfigError: The agent cannot play here at all.
    """
    try:
        return await agent.aact(request)
    except ConfigError:
        raise
    except AgentError as failure:
        return failure
    except BaseException as error:  # foreign code: one agent's error is one failed episode
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the driver no longer waits; a client may also cancel its own tasks
        if is_interruption(error):
            raise
        return failure_of(AgentError, f"{_class_name(agent)}.aact", error, agent.aact)


async def _answer_all(agent: Any, requests: Sequence[TurnRequest]) -> list[Action | AgentError]:
    tasks = [asyncio.ensure_future(answer(agent, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # those that are still running where one raised


class _Adapted(Agent):
    """Any object that has ``get_action(messages, agent_state)``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.get_action = inner.get_action


class _AdaptedAsync(AsyncAgent):
    """Any object that has ``async def aact(request)``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.aact = inner.aact
        self.finish = getattr(inner, "finish", self.finish)


def _class_name(agent: Any) -> str:
    """The class that the user wrote."""
    return type(agent.inner if isinstance(agent, _Adapted | _AdaptedAsync) else agent).__name__


def as_agent(agent: Any) -> Agent:
    """Return an :class:`Agent` as it is; adapt any object with ``aact(request)`` or ``get_action(messages, state)``.

    Raises:
        ConfigError: It has neither, it is a class, or its ``get_action`` is a coroutine function.
    """
    is_instance = not isinstance(agent, type)
    if is_instance and callable(getattr(agent, "aact", None)):
        return agent if isinstance(agent, AsyncAgent) else _AdaptedAsync(agent)
    if isinstance(agent, Agent):
        return agent
    if is_instance and callable(getattr(agent, "get_action", None)):
        _refuse_coroutines(cast("type[Any]", type(agent)))
        return _Adapted(agent)
    is_class_of_agents = not is_instance and any(hasattr(agent, name) for name in ("get_action", "act", "aact"))
    given = f"the class {agent.__name__}: write {agent.__name__}()" if is_class_of_agents else shown(agent)
    if inspect.isroutine(agent) or isinstance(agent, functools.partial):
        given += ": write DirectOutputAgent(function) for a function of the messages that returns the answer's text"
    raise ConfigError(
        "an agent needs get_action(messages, agent_state) or async aact(request), or to subclass agentsgym.Agent, "
        f"got {given}"
    )
