"""The base classes of agents."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

from agentsgym.errors import AgentError, AgentsGymError, ConfigError
from agentsgym.event_loop import gathered, run_coroutine
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.types import Action, Message, TurnRequest

logger = logging.getLogger(__name__)

_TO_WRITE = "only aact is awaited: subclass agentsgym.AsyncAgent and write async def aact(self, request) -> Action"


def _refuse_coroutines(cls: type) -> None:
    """Raise :class:`ConfigError` for a class whose ``get_action`` or ``act`` would return a coroutine."""
    for name in ("get_action", "act"):
        if inspect.iscoroutinefunction(getattr(cls, name, None)):
            raise ConfigError(f"{cls.__name__}.{name} is async, and {_TO_WRITE}")


class Agent:
    """The base class of agents that answer turns, one conversation at a time or in batches.

    A simple agent defines :meth:`get_action`; an agent that benefits from batches defines :meth:`act`. Agents never
    tokenize for training: they return the ids that they sampled, or only text.

    Attributes:
        context_length: Maximum number of tokens of a prompt and its answer, at which episodes end with ``max_tokens``;
            None if there is none, or it is unknown.
    """

    context_length: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_coroutines(cls)

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Answer one turn.

        Args:
            messages: The conversation so far, ending with the new observation; must not be changed.
            agent_state: The state that this agent last returned for this conversation; None at first.

        Returns:
            The answer, and the ``agent_state`` for the next turn.
        """
        name = type(self).__name__
        if type(self).act is not Agent.act:
            raise NotImplementedError(
                f"{name} does not implement get_action, since it works on token ids: call env.rollout(tasks, agent) or "
                "evaluate(env, agent, tasks) with an environment that has a tokenizer"
            )
        raise NotImplementedError(f"{name} must define get_action or act")

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer one turn of each session, in the order of ``requests``.

        A session that cannot be answered gets an :class:`AgentError` in place of its action, and the others continue.
        """
        return [self._answer(request) for request in requests]

    def finish(self) -> None:
        """Free the resources of the episodes, all of which have ended."""

    def _answer(self, request: TurnRequest) -> Action | AgentError:
        try:
            answer: Any = self.get_action([*request.messages], request.agent_state)  # it may change its list
        except ConfigError:
            raise  # no episode can be played
        except BaseException as error:  # user code: an error fails only this episode
            if is_interruption(error):
                raise
            return failure_of(AgentError, f"{_class_name(self)}.get_action", error, self.get_action)
        if inspect.iscoroutine(answer):
            answer.close()  # otherwise Python warns that it was never awaited
            return AgentError(f"{_class_name(self)}.get_action returned a coroutine, and {_TO_WRITE}")
        pair = cast("tuple[Any, ...]", answer if isinstance(answer, tuple) else ())
        if len(pair) != 2 or not isinstance(pair[0], str):
            return AgentError(
                f"{_class_name(self)}.get_action must return (text, agent_state), got {shown(cast('object', answer))}"
            )
        return Action(text=pair[0], agent_state=pair[1])


class AsyncAgent(Agent):
    """The base class of agents that answer each turn with a coroutine, so that many sessions can wait concurrently.

    A subclass defines :meth:`aact`. An environment's ``rollout`` then runs every episode at its own pace: an episode's
    next request is sent as soon as its step is done. All coroutines of all agents run on one event loop, which the
    library owns and which lives as long as the process: clients and locks may be reused in later rollouts, and a
    coroutine that blocks delays all sessions.
    """

    async def aact(self, request: TurnRequest) -> Action:
        """Answer one turn of one session; an exception fails that session, a :class:`ConfigError` ends the run."""
        raise NotImplementedError(f"{type(self).__name__} must define aact")

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer all requests concurrently; must be called from outside the agents' event loop.

        Raises:
            ConfigError: The agent is not configured correctly for this run.
        """
        return run_coroutine(gathered(answer(self, request) for request in requests)) if requests else []

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        """Answer one turn as text."""
        request = TurnRequest(session_id="", messages=messages, token_ids=(), agent_state=agent_state)
        action = run_coroutine(self.aact(request))
        return action.text, action.agent_state


async def answer(agent: Any, request: TurnRequest) -> Action | AgentError:
    """Await an agent's ``aact``; an exception fails only this session.

    Raises:
        ConfigError: The agent is not configured correctly for this run.
    """
    try:
        returned = agent.aact(request)
        if isinstance(returned, Action):
            return AgentError(f"{_class_name(agent)}.aact must be awaited, so write async def aact(self, request)")
        return await returned
    except ConfigError:
        raise
    except AgentError as failure:
        return failure
    except BaseException as error:  # user code: an error fails only this episode
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the driver no longer waits; a client may also cancel its own tasks
        if is_interruption(error):
            raise
        return failure_of(AgentError, f"{_class_name(agent)}.aact", error, agent.aact)


def call_agent(agent: Agent, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
    """Call an agent once for all requests; if that raises, split the batch to find the requests that cause it."""
    if not requests:
        return []
    answers: Any
    try:
        answers = agent.act(requests)
        answers = [*cast("Sequence[Any]", answers)] if isinstance(answers, Sequence) else answers
    except ConfigError:
        raise  # affects all trials, so it ends the run
    except BaseException as error:  # user code: the error fails only the trials of these requests
        if is_interruption(error):
            raise
        answers = failure_of(AgentError, f"{type(agent).__name__}.act", error, agent.act)
    if isinstance(answers, AgentError) and len(requests) > 1:
        # Splitting in halves isolates the requests that the agent cannot answer, so that only their trials fail. It is
        # outside the except block, so that the next error does not have this one as its context.
        half = len(requests) // 2
        return [*call_agent(agent, requests[:half]), *call_agent(agent, requests[half:])]
    if isinstance(answers, AgentError):
        return [answers]
    if not isinstance(answers, list) or len(cast("list[Any]", answers)) != len(requests):
        wanted = f"{type(agent).__name__}.act must return one Action per request"
        given = f"{len(requests)} requests, got {shown(cast('object', answers))}"
        return [AgentError(f"{wanted}: {given}") for _ in requests]
    return cast("list[Action | AgentError]", answers)


def finish_agent(agent: Agent) -> None:
    """Call an agent's ``finish``; errors are logged, since every trial already has its result.

    Errors raised by a policy that is being trained are re-raised, since its ranks synchronize in ``finish``.
    """
    try:
        agent.finish()
    except BaseException as error:
        if is_interruption(error) or isinstance(error, AgentsGymError) or hasattr(agent, "prepare"):
            raise
        failure = failure_of(AgentError, f"{type(agent).__name__}.finish", error, agent.finish)
        logger.warning("%s\n%s", failure, failure.trace)


class _Adapted(Agent):
    """An adapter for any object that has ``get_action(messages, agent_state)``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.get_action = inner.get_action


class _AdaptedAsync(AsyncAgent):
    """An adapter for any object that has ``async def aact(request)``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.aact = inner.aact
        self.finish = getattr(inner, "finish", self.finish)


def _class_name(agent: Any) -> str:
    """Return the name of the class that the user wrote."""
    return type(agent.inner if isinstance(agent, _Adapted | _AdaptedAsync) else agent).__name__


def as_agent(agent: Any) -> Agent:
    """Return an :class:`Agent` unchanged; adapt an object with ``aact(request)`` or ``get_action(messages, state)``."""
    is_instance = not isinstance(agent, type)
    if is_instance and callable(getattr(agent, "aact", None)):
        return agent if isinstance(agent, AsyncAgent) else _AdaptedAsync(agent)
    if isinstance(agent, Agent):
        return agent
    if is_instance and callable(getattr(agent, "get_action", None)):
        _refuse_coroutines(cast("type[Any]", type(agent)))
        return _Adapted(agent)
    is_class_of_agents = not is_instance and any(hasattr(agent, name) for name in ("get_action", "act", "aact"))
    received = (
        f"the class {agent.__name__}: pass an instance, {agent.__name__}()" if is_class_of_agents else shown(agent)
    )
    if inspect.isroutine(agent) or isinstance(agent, functools.partial):
        received += ": for a function of the messages that returns the answer's text, use DirectOutputAgent(function)"
    raise ConfigError(
        "an agent must define get_action(messages, agent_state) or async aact(request), or subclass agentsgym.Agent; "
        f"got {received}"
    )
