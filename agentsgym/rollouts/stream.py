"""Play trials in a background thread while more are added; each result is delivered as soon as it is ready.

::

    add ─▶ waiting ─▶ Scheduler, on the stream's thread ─▶ on_finish
    add ─▶            (executor, agent caller: as in drive)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from agentsgym.agents.base import Agent, finish_agent
from agentsgym.errors import AgentsGymError
from agentsgym.rollouts.driver import BatchCaller, ConcurrentCaller
from agentsgym.rollouts.interfaces import PlayableTrial, Result, TimeLimits
from agentsgym.rollouts.loop_executor import OwnExecutor
from agentsgym.rollouts.scheduler import Pool, Scheduler

logger = logging.getLogger(__name__)

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
