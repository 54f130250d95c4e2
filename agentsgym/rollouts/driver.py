"""Play many trials concurrently: each yields requests, for which the agent is called at once or one by one.

:func:`drive` plays a fixed set; in a :class:`TrialStream`, more are added while others play in a background thread::

    add ─▶ waiting ─▶ Scheduler, on the stream's thread ─▶ on_finish
    add ─▶            (executor, agent caller: as in drive)
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from agentsgym.agents.base import Agent, answer, call_agent, finish_agent
from agentsgym.errors import AgentError, AgentsGymError
from agentsgym.event_loop import agents_loop, is_on_agents_loop
from agentsgym.fields import Check, is_int, is_positive_number, or_none, require
from agentsgym.rollouts.loop_executor import OwnExecutor
from agentsgym.rollouts.scheduler import (
    GRACE_S,
    AgentCaller,
    PlayableTrial,
    Pool,
    Raised,
    Result,
    Scheduler,
    TimeLimits,
)
from agentsgym.types import Action, TurnRequest

logger = logging.getLogger(__name__)


class BatchCaller(AgentCaller):
    """Calls the agent once for all live trials."""

    def __init__(self, scheduler: Scheduler[Any], agent: Agent) -> None:
        self._scheduler = scheduler
        self._agent = agent

    def call(self, requests: dict[int, TurnRequest]) -> None:
        """Call the agent in the order of the trials, since it may draw random numbers for them in sequence."""
        order = sorted(requests)
        answers = call_agent(self._agent, [requests[index] for index in order])
        self._scheduler.on_answers(zip(order, answers, strict=True))


class ConcurrentCaller(AgentCaller):
    """Calls the agent separately for each trial, all concurrently on the agents' event loop."""

    is_batched = False

    def __init__(self, scheduler: Scheduler[Any], agent: Any) -> None:
        self._scheduler = scheduler
        self._agent = agent
        self._open: dict[int, tuple[TurnRequest, float]] = {}  # requests and their times, the oldest first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # this and the next attribute are only accessed on the loop
        self._ending: list[asyncio.Task[None]] = []

    def call(self, requests: dict[int, TurnRequest]) -> None:
        """Start the coroutines; each posts its answer to the scheduler."""
        if is_on_agents_loop():
            raise RuntimeError(
                "env.rollout with an async agent was called on the agents' event loop, for example from another "
                "agent's aact, and would block it: use await asyncio.to_thread(env.rollout, …)"
            )
        if self._loop is None:
            self._loop = agents_loop()
        now = time.monotonic()
        self._open.update({index: (request, now) for index, request in requests.items()})
        self._loop.call_soon_threadsafe(self._start, requests)

    def oldest_request(self) -> tuple[int, float] | None:
        """The trial that has waited longest for its answer, and since when."""
        return next(((index, since) for index, (_, since) in self._open.items()), None)

    def cancel(self, index: int) -> bool:
        """Cancel the coroutine; if it still returns an answer, the answer is discarded."""
        if self._open.pop(index, None) is None:
            return False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, index)
        return True

    def close(self) -> None:
        """Cancel all running coroutines, and wait until they have ended."""
        if self._loop is not None:
            ended = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
            if wait([ended], GRACE_S).not_done:
                name = type(self._agent).__name__
                logger.warning("%s: some coroutines were still running %s s after they were canceled", name, GRACE_S)

    def _arrived(self, index: int, request: TurnRequest, answer: Action | AgentError | Raised) -> None:
        known = self._open.get(index)
        if known is None or known[0] is not request:
            return  # it was canceled
        del self._open[index]
        if isinstance(answer, Raised):
            raise answer.error
        self._scheduler.on_answers([(index, answer)])

    # The methods below run on the agents' event loop.

    def _start(self, requests: dict[int, TurnRequest]) -> None:
        for index, request in requests.items():
            task = self._tasks[index] = asyncio.ensure_future(self._answer(index, request))
            task.add_done_callback(partial(self._forget, index))

    def _forget(self, index: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(index) is task:  # and not the task of the next turn
            del self._tasks[index]

    async def _answer(self, index: int, request: TurnRequest) -> None:
        try:
            given: Action | AgentError | Raised = await answer(self._agent, request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # re-raised on the scheduler's thread
            given = Raised(error)
        self._scheduler.post(self._arrived, index, request, given)

    def _cancel(self, index: int) -> None:
        task = self._tasks.pop(index, None)
        if task is None:
            return  # its answer has been posted, and will be discarded
        task.cancel()
        self._ending = [task, *(other for other in self._ending if not other.done())]

    async def _end_all(self) -> None:
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def drive(  # noqa: PLR0913  # keywords, most of them usually omitted
    trials: Iterable[PlayableTrial[Result]],
    agent: Agent,
    *,
    max_concurrent: int | None = None,
    on_finish: Callable[[Result], None] | None = None,
    pool: Pool | None = None,
    turn_timeout_s: float | None = None,
    episode_timeout_s: float | None = None,
    interrupt: Callable[[], None] | None = None,
) -> list[Result]:
    """Play all trials to their ends, many concurrently, and return their results in the order of the trials.

    A batched agent is called once per round for all live trials. An agent with coroutines (``async def aact``) is
    called for each trial as soon as the trial's step is done. Without a pool, trials of environments whose hooks are
    coroutines play on the event loop, where they wait at the same time. An error of the agent is thrown into the trial
    concerned, which decides how to handle it; the others continue. The results do not depend on how the agent is called
    or where the environments run.

    A time limit ends a trial with an error; the others continue. Steps in a pool are abandoned, and coroutines are
    canceled; other steps on this thread cannot be interrupted, so the limit is checked when the environment's call
    returns. Calls of a batched agent count toward the limit of a trial, but not toward the limit of a turn.

    Args:
        trials: The trials to play.
        agent: The agent that answers the requests.
        max_concurrent: Maximum number of live trials; None for all of them.
        on_finish: Called on this thread with each result as soon as it is available.
        pool: Where the environments run: an ``EnvThreadPool``, an ``EnvProcessPool``, or None for the calling thread.
        turn_timeout_s: Wall-clock limit in seconds for one step of an environment, and for one answer of an agent with
            coroutines; None for no limit.
        episode_timeout_s: Wall-clock limit in seconds for a complete trial, including waits for a free thread or
            process; None for no limit.
        interrupt: Called between turns, and a few times per second while waiting; an exception from it ends the run.

    Raises:
        ConfigError: A setting is invalid, the environment cannot be sent to the pool's processes, or the agent raised
            a ``ConfigError``. Results that were available before have been passed to ``on_finish``.
    """
    require("max_concurrent", max_concurrent, or_none(is_int(1)), "a positive int or None")
    for name, limit in (("turn_timeout_s", turn_timeout_s), ("episode_timeout_s", episode_timeout_s)):
        require(name, limit, or_none(is_positive_number), "a positive number of seconds or None")
    limits = TimeLimits(turn_s=turn_timeout_s, trial_s=episode_timeout_s)
    is_pool: Check = lambda value: hasattr(value, "begin_run") and not isinstance(value, type)  # noqa: E731
    require("pool", pool, or_none(is_pool), "a pool such as EnvThreadPool(4), or None")
    caller = ConcurrentCaller if callable(getattr(agent, "aact", None)) else BatchCaller
    try:
        scheduler = Scheduler(
            trials, limits=limits, max_concurrent=max_concurrent, on_finish=on_finish, interrupt=interrupt
        )
        executor = OwnExecutor(scheduler) if pool is None else pool.begin_run(scheduler)
        return scheduler.run(executor, caller(scheduler, agent))
    finally:
        finish_agent(agent)


_END_S = 60.0  # how long closing a stream waits for a running answer of a batched agent


class _Ended(BaseException):
    """Raised when the stream is closed, to drop the live trials."""


class OpenScheduler(Scheduler[Result]):
    """A scheduler that accepts new trials while it runs, and discards finished ones."""

    def __init__(self, *, limits: TimeLimits, max_concurrent: int, on_finish: Callable[[Result], None]) -> None:
        super().__init__((), limits=limits, max_concurrent=max_concurrent, on_finish=on_finish)
        self._num_added = 0

    @property
    def num_trials(self) -> int:
        """The maximum number of live trials."""
        return self._max_live

    @property
    def is_over(self) -> bool:
        """Always False: the scheduler runs until :meth:`end` is called."""
        return False

    def add(self, trials: Sequence[PlayableTrial[Result]]) -> None:
        """Add trials; may be called from any thread."""
        self.post(self._added, trials)

    def end(self) -> None:
        """Drop the live trials, and return from :meth:`run`; may be called from any thread."""
        self.post(_raise_ended)

    def _admit(self) -> None:
        self._handle_posted()  # needed because with a batched agent, the loop may never wait
        super()._admit()

    def _added(self, trials: Sequence[PlayableTrial[Result]]) -> None:
        for trial in trials:
            self.trials[self._num_added] = trial
            self._turns[self._num_added] = -1
            self._waiting.append(self._num_added)
            self._num_added += 1

    def _finish(self, index: int, result: Result) -> None:
        super()._finish(index, result)
        for kept in (self.trials, self._turns, self._results):
            del kept[index]


class TrialStream:
    """Plays trials in a thread, first come, first served, at most ``max_concurrent`` at a time.

    The results do not depend on the thread. An error that is not the failure of a trial ends the stream and is raised
    by :meth:`check`.
    """

    def __init__(
        self,
        agent: Agent,
        on_finish: Callable[[Any], None],
        *,
        max_concurrent: int,
        pool: Pool | None = None,
        turn_timeout_s: float | None = None,
        episode_timeout_s: float | None = None,
    ) -> None:
        """Start the thread, without any trials.

        Args:
            agent: The agent; its ``finish`` is called when the stream is closed.
            on_finish: Called with each result, on the stream's thread.
            max_concurrent: Maximum number of live trials.
            pool: Where the environments run; None for the stream's thread. Reserved for the stream until :meth:`close`.
            turn_timeout_s: See :func:`~agentsgym.rollouts.driver.drive`.
            episode_timeout_s: See :func:`~agentsgym.rollouts.driver.drive`.
        """
        limits = TimeLimits(turn_s=turn_timeout_s, trial_s=episode_timeout_s)
        self._scheduler: OpenScheduler[Any] = OpenScheduler(
            limits=limits, max_concurrent=max_concurrent, on_finish=on_finish
        )
        self._agent, self._pool = agent, pool
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="agentsgym-rollouts", daemon=True)
        self._thread.start()

    def add(self, trials: Sequence[PlayableTrial[Any]]) -> None:
        """Add trials to the end of the queue; may be called from any thread, even from ``on_finish``."""
        self._scheduler.add(trials)

    def post(self, function: Callable[[], None]) -> None:
        """Call a function on the stream's thread; may be called from any thread."""
        self._scheduler.post(function)

    def check(self) -> None:
        """Raise :class:`AgentsGymError` if the stream has failed and no longer plays trials."""
        if self._error is not None:
            raise AgentsGymError(f"the rollouts failed: {type(self._error).__name__}: {self._error}") from self._error

    def close(self) -> None:
        """End the thread and drop the live trials; a thread whose agent does not return is abandoned."""
        self._scheduler.end()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            logger.warning("%s did not return within %g s: its thread is abandoned", type(self._agent).__name__, _END_S)

    def _run(self) -> None:
        caller = ConcurrentCaller if callable(getattr(self._agent, "aact", None)) else BatchCaller
        scheduler = self._scheduler
        try:
            try:
                executor = OwnExecutor(scheduler) if self._pool is None else self._pool.begin_run(scheduler)
                scheduler.run(executor, caller(scheduler, self._agent))
            finally:
                finish_agent(self._agent)
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001  # raised by check()
            self._error = error


def _raise_ended() -> None:
    raise _Ended
