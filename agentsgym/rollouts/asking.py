"""Asking an agent: for all at once, or each session by itself."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any, Protocol, cast

from agentsgym.agents.asynchronous import agents_loop, is_on_agents_loop
from agentsgym.agents.base import answer
from agentsgym.errors import AgentFault, ConfigError
from agentsgym.rollouts.scheduler import Desk, Raised
from agentsgym.types import Action, TurnRequest

logger = logging.getLogger(__name__)

_GRACE_S = 5.0  # how long a coroutine that was cancelled may take to end


class Actor(Protocol):
    """What the driver needs of an agent; one that also has ``async def aact(request)`` is asked through that."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
        """Answer the requests in order; a fault stands for a session that cannot be answered."""
        ...

    def finish(self) -> None:
        """Learn that no episode is live any more."""
        ...


def ask(actor: Actor, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
    """Ask once for all; where that raises, find those that cannot be answered by halving."""
    if not requests:
        return []
    try:
        answers: Any = actor.act(requests)
    except ConfigError:
        raise  # no episode's fault: none could be played
    except Exception as error:  # noqa: BLE001  # foreign code: the error belongs to the episodes that met it
        if len(requests) > 1:
            # Halving finds the requests that the agent cannot answer, so that only their episodes fail.
            half = len(requests) // 2
            return [*ask(actor, requests[:half]), *ask(actor, requests[half:])]
        fault = AgentFault(f"{type(actor).__name__}.act raised {error!r}\n{traceback.format_exc()}")
        return [fault]
    if not isinstance(answers, Sequence) or len(cast("Sequence[Any]", answers)) != len(requests):
        wanted = f"{type(actor).__name__}.act must return one Action a request"
        given = f"{len(requests)} requests, got {_shortened(cast('object', answers))}"
        return [AgentFault(f"{wanted}: {given}") for _ in requests]
    return cast("Sequence[Action | AgentFault]", answers)


class Together:
    """Asks for all live episodes at once."""

    together = True

    def __init__(self, desk: Desk, actor: Actor) -> None:
        self._desk = desk
        self._actor = actor

    def ask(self, requests: dict[int, TurnRequest]) -> None:
        """Ask, and wait for the answers; in the episodes' order, since an agent may draw for one after the other."""
        order = sorted(requests)
        for index, action in zip(order, ask(self._actor, [requests[index] for index in order]), strict=True):
            self._desk.answered(index, action)

    def oldest(self) -> None:
        """Nobody waits, seen from outside of :meth:`ask`."""

    def cancel(self, index: int) -> bool:
        """Nobody waits."""
        return False

    def close(self) -> None:
        """Nobody waits."""


class Apart:
    """Asks for each episode by itself, all side by side on the agents' event loop."""

    together = False

    def __init__(self, desk: Desk, actor: Any) -> None:
        self._desk = desk
        self._actor = actor
        self._open: dict[int, tuple[TurnRequest, float]] = {}  # in the order of time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # this and the next are touched on the loop alone
        self._ending: list[asyncio.Task[None]] = []

    def ask(self, requests: dict[int, TurnRequest]) -> None:
        """Have the coroutines started; their answers are posted.

        Raises:
            RuntimeError: It is called on the loop that is to run them.
        """
        if is_on_agents_loop():
            raise RuntimeError(
                "an agent's coroutine cannot wait for the rollout of an async agent, since both need the agents' event "
                "loop: await asyncio.to_thread(env.rollout, …)"
            )
        if self._loop is None:
            self._loop = agents_loop()
        now = time.monotonic()
        self._open.update({index: (request, now) for index, request in requests.items()})
        self._loop.call_soon_threadsafe(self._start, requests)

    def oldest(self) -> tuple[int, float] | None:
        """The episode that has waited longest."""
        return next(((index, since) for index, (_, since) in self._open.items()), None)

    def cancel(self, index: int) -> bool:
        """Cancel the coroutine; what it says from now on is not heard."""
        if self._open.pop(index, None) is None:
            return False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, index)
        return True

    def close(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        if self._loop is not None:
            ended = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
            if wait([ended], _GRACE_S).not_done:
                logger.warning("coroutines of %s did not end within %s s", type(self._actor).__name__, _GRACE_S)

    def _arrived(self, index: int, request: TurnRequest, action: Action | AgentFault | Raised) -> None:
        known = self._open.get(index)
        if known is None or known[0] is not request:
            return  # it was cancelled
        del self._open[index]
        if isinstance(action, Raised):
            raise action.error
        self._desk.answered(index, action)

    # On the loop

    def _start(self, requests: dict[int, TurnRequest]) -> None:
        for index, request in requests.items():
            self._tasks[index] = asyncio.ensure_future(self._answer(index, request))

    async def _answer(self, index: int, request: TurnRequest) -> None:
        try:
            action: Action | AgentFault | Raised = await answer(self._actor, request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # raised again on the scheduler's thread
            action = Raised(error)
        self._desk.post(self._arrived, index, request, action)

    def _cancel(self, index: int) -> None:
        task = self._tasks.pop(index)
        task.cancel()
        self._ending = [task, *(other for other in self._ending if not other.done())]

    async def _end_all(self) -> None:
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shortened(value: object, width: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[:width]}…"
