"""Advance trials without a pool: on the event loop if a hook of the environment is async, else on this thread."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentsgym.errors import EpisodeError
from agentsgym.event_loop import agents_loop, run_on_loop
from agentsgym.rollouts.scheduler import (
    BATCHING_WINDOW_S,
    GRACE_S,
    Executor,
    Finished,
    Input,
    Raised,
    Scheduler,
    TrialGenerator,
    TrialOutcome,
    advance,
)

logger = logging.getLogger(__name__)

_MAX_STEPS = 64  # on the thread, before other events are handled


def has_coroutines(trial: Any) -> bool:
    """Whether a hook of a trial's environment is async."""
    return bool(getattr(getattr(trial, "env", None), "has_coroutines", False))


class OwnExecutor(Executor):
    """Advances trials with async hooks on the agents' event loop, and all others on the scheduler's own thread.

    A step on the thread cannot be interrupted.
    """

    def __init__(self, scheduler: Scheduler[Any]) -> None:
        self._scheduler = scheduler
        self._generators: dict[int, TrialGenerator[Any]] = {}  # on the thread
        self._on_loop: LoopExecutor | None = None

    def advance(self, inputs: dict[int, Input]) -> None:
        """Advance trials for a short time, so that the request of a fast trial does not wait for all other steps."""
        scheduler, generators = self._scheduler, self._generators
        limit, interrupt = scheduler.limits.turn_s, scheduler.interrupt
        end = time.monotonic() + BATCHING_WINDOW_S
        for index in [*islice(inputs, _MAX_STEPS)]:
            if (began := time.monotonic()) >= end:
                break
            if interrupt is not None:
                interrupt()
            given = inputs.pop(index)
            generator = generators.get(index)
            if generator is None:
                trial = scheduler.trials[index]
                if has_coroutines(trial):
                    self._on_loop = self._on_loop or LoopExecutor(scheduler)
                    self._on_loop.advance({index: given})
                    continue
                generator = generators[index] = trial.play()
            try:  # like scheduler.advance, inlined for a shorter traceback; any other exception ends the run
                outcome = generator.throw(given) if isinstance(given, EpisodeError) else generator.send(given)  # type: ignore[arg-type]  # None starts it
            except StopIteration as stop:
                outcome = Finished(stop.value)
                del generators[index]
            if limit is not None and time.monotonic() - began > limit:
                generator.close()
                generators.pop(index, None)
                outcome = Finished(scheduler.trials[index].abandon(scheduler.timeout_error(index)))
            scheduler.on_outcome(index, outcome)

    def running(self) -> list[tuple[int, float]]:
        """The trials whose steps have begun on the loop, and since when."""
        return [] if self._on_loop is None else self._on_loop.running()

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Cancel a step that runs on the loop."""
        if self._on_loop is not None and has_coroutines(self._scheduler.trials[index]):
            self._on_loop.abandon(index, error)

    def close(self) -> None:
        """End every live trial."""
        for generator in self._generators.values():
            generator.close()
        if self._on_loop is not None:
            self._on_loop.close()


@dataclass(slots=True, eq=False)
class _Step:
    """One step of one trial.

    Attributes:
        index: The trial.
        generator: The trial's generator.
        task: The step's task; None before the loop knows it.
        since: When it began, on the monotonic clock; None before.
    """

    index: int
    generator: TrialGenerator[Any]
    task: asyncio.Task[None] | None = None
    since: float | None = None


class LoopExecutor(Executor):
    """Advances every trial on the agents' event loop, where trials that wait for a coroutine leave room for others.

    All hooks run there, also those that are not async, so hooks never overlap between two points where one waits. A
    step that takes too long is canceled: the error is raised where its hook waits, and its episode is closed.
    """

    def __init__(self, scheduler: Scheduler[Any]) -> None:
        self._scheduler = scheduler
        self._loop = agents_loop()
        self._generators: dict[int, TrialGenerator[Any]] = {}
        self._steps: dict[int, _Step] = {}
        self._ending: set[asyncio.Task[None]] = set()  # abandoned steps that still close their episodes

    def advance(self, inputs: dict[int, Input]) -> None:
        """Start a step for each input."""
        self._scheduler.expect(inputs)
        started: list[tuple[_Step, Input]] = []
        for index, given in inputs.items():
            if index not in self._generators:
                self._generators[index] = self._scheduler.trials[index].play()
            self._steps[index] = step = _Step(index, self._generators[index])
            started.append((step, given))
        inputs.clear()
        self._loop.call_soon_threadsafe(self._start, started)

    def running(self) -> list[tuple[int, float]]:
        """The trials whose steps have begun, and since when."""
        return [(index, step.since) for index, step in self._steps.items() if step.since is not None]

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Cancel a step, and end its trial without waiting for it."""
        step = self._steps.pop(index)
        del self._generators[index]
        self._loop.call_soon_threadsafe(self._cancel, step)
        self._scheduler.on_outcome(index, Finished(self._scheduler.trials[index].abandon(error)))

    def close(self) -> None:
        """Cancel the running steps, and close every episode."""
        ended = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        if wait([ended], GRACE_S).not_done:
            logger.warning("some episodes were still being closed %s s after their trials were canceled", GRACE_S)

    def _stepped(self, step: _Step, outcome: TrialOutcome) -> None:
        if self._steps.get(step.index) is step:  # otherwise it was abandoned
            del self._steps[step.index]
            if isinstance(outcome, Finished | Raised):
                del self._generators[step.index]
            self._scheduler.on_outcome(step.index, outcome)

    # The methods below run on the event loop.

    def _start(self, started: list[tuple[_Step, Input]]) -> None:
        for step, given in started:
            step.task = asyncio.ensure_future(self._run(step, given))

    async def _run(self, step: _Step, given: Input) -> None:
        step.since = time.monotonic()
        outcome = await run_on_loop(advance, step.generator, given)
        self._scheduler.post(self._stepped, step, outcome)

    def _cancel(self, step: _Step) -> None:
        ending = asyncio.ensure_future(self._end(step))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, step: _Step) -> None:
        if step.task is not None:
            step.task.cancel()
            await asyncio.wait([step.task])
        await run_on_loop(step.generator.close)

    async def _end_all(self) -> None:
        for step in self._steps.values():
            self._cancel(step)
        idle = [self._generators[index] for index in self._generators.keys() - self._steps.keys()]
        closing = [run_on_loop(generator.close) for generator in idle]
        await asyncio.gather(*closing, *self._ending, return_exceptions=True)
