"""The main loop of a run: advance trials (here, in a thread or in a process) and call the agent for their requests.

::

               ┌───────────── inputs ─────────────▶ Executor: advances trials ─┐
    waiting ─▶ │                                                               ├─▶ on_finish, results
               └─ AgentCaller: calls the agent ◀──── requests ◀────────────────┘

Events on other threads are posted to one inbox and handled on the thread that called ``drive``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from agentsgym.errors import AgentError, EnvError, EpisodeError
from agentsgym.types import Action, TurnRequest

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
TrialGenerator = Generator[TurnRequest, Action, Result]
Input = Action | EpisodeError | None  # an answer, an error to end the trial, or None to start it

BATCHING_WINDOW_S = 0.001  # how long a finished step may wait for others, to be processed together
GRACE_S = 5.0  # time for running work to end when a run is aborted


class PlayableTrial(Protocol[Result_co]):
    """The driver's view of a trial.

    Attributes:
        session_id: Identifies the trial in messages.
        env: The environment that trials share; a process pool sends it to each worker once.
    """

    session_id: str
    env: Any

    @property
    def may_wait(self) -> bool:
        """Whether a step may wait for other trials, whose requests a batched agent then answers without this one."""
        ...

    def play(self) -> Generator[TurnRequest, Action, Result_co]:
        """Start the trial: return a generator that yields requests and receives actions or thrown errors."""
        ...

    def abandon(self, error: EpisodeError, /) -> Result_co:
        """Make the result of a trial whose generator can no longer be advanced (and may still be running)."""
        ...


class Finished(NamedTuple):
    """The end of a trial."""

    result: Any


class Raised(NamedTuple):
    """An error raised in a trial that is not a failure of that trial; it ends the run."""

    error: BaseException


TrialOutcome = TurnRequest | Finished | Raised


def advance(generator: TrialGenerator[Any], given: Input) -> TrialOutcome:
    """Advance a trial to its next request or its end."""
    try:
        return generator.throw(given) if isinstance(given, EpisodeError) else generator.send(given)  # type: ignore[arg-type]  # None starts it
    except StopIteration as stop:
        return Finished(stop.value)
    except BaseException as error:  # noqa: BLE001  # re-raised on the scheduler's thread
        return Raised(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Wall-clock limits in seconds; None for no limit.

    Attributes:
        turn_s: Limit for one step of an environment, and for one answer of an async agent.
        trial_s: Limit for a complete trial, from its first episode to its last (``episode_timeout_s`` of a rollout).
    """

    turn_s: float | None = None
    trial_s: float | None = None


class Executor:
    """Advances the trials of one run.

    Attributes:
        max_live: Maximum number of live trials; None for any number.
    """

    max_live: int | None = None

    def advance(self, inputs: dict[int, Input]) -> None:
        """Process some or all of the inputs, or start to, and remove these from ``inputs``.

        Before the scheduler can go on, it needs to know the trials whose steps continue elsewhere:
        :meth:`Scheduler.expect`.
        """
        raise NotImplementedError

    def running(self) -> list[tuple[int, float]]:
        """The trials whose step is running, and since when (on the monotonic clock)."""
        raise NotImplementedError

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Stop waiting for a running or queued step: its worker becomes free soon, and its trial ends."""
        raise NotImplementedError

    def close(self) -> None:
        """End every live trial."""
        raise NotImplementedError


class AgentCaller:
    """Calls the agent; here, no trial waits for an answer outside of :meth:`call`.

    Attributes:
        is_batched: Whether the agent is called once for all live trials.
    """

    is_batched = True

    def call(self, requests: dict[int, TurnRequest]) -> None:
        """Call the agent with the requests of these trials."""
        raise NotImplementedError

    def oldest_request(self) -> tuple[int, float] | None:
        """The trial that has waited longest for its answer, and since when."""
        return None

    def cancel(self, index: int) -> bool:
        """Drop the answer that a trial waits for; return whether it waited for one."""
        return False

    def close(self) -> None:
        """Drop every pending answer."""


_POLL_S = 0.5  # seconds between calls of ``interrupt`` while nothing happens
_QUIET_S = 0.05  # without a new request, after which a batched agent no longer waits for programs


class Pool(Protocol):
    """Workers that advance trials, in any number of runs."""

    def begin_run(self, scheduler: Scheduler[Any]) -> Executor:
        """Make the executor of one run."""
        ...

    def close(self) -> None:
        """Stop the workers; a later run starts new ones."""
        ...


class Scheduler(Generic[Result]):
    """Plays all trials to their ends; the turns of different trials are played in any order.

    Attributes:
        trials: The trials to play.
        limits: Wall-clock limits per turn and per trial.
        interrupt: Called between turns, unless it is None; an exception from it ends the run.
    """

    def __init__(
        self,
        trials: Iterable[PlayableTrial[Result]],
        *,
        limits: TimeLimits,
        max_concurrent: int | None,
        on_finish: Callable[[Result], None] | None,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.trials = dict(enumerate(trials))
        self.limits = limits
        self._max_live = len(self.trials) if max_concurrent is None else max_concurrent
        self._on_finish = on_finish
        self.interrupt = interrupt
        self._waiting = deque(self.trials)
        self._turns = dict.fromkeys(self.trials, -1)  # before the first request
        self._began: dict[int, float] = {}  # start time, or time of the last timeout, by trial; ordered by time
        self._inputs: dict[int, Input] = {}
        self._stepping: set[int] = set()  # trials whose steps run elsewhere
        self._requests: dict[int, TurnRequest] = {}
        self._pending_errors: dict[int, EpisodeError] = {}  # to be thrown at the next request
        self._num_live = 0
        self._check_at = math.inf if limits == TimeLimits() else 0.0
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._results: dict[int, Result] = {}

    @property
    def num_trials(self) -> int:
        """The number of trials, which also bounds how many can be live concurrently."""
        return len(self.trials)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to play."""
        return len(self._results) == len(self.trials)

    def run(self, executor: Executor, caller: AgentCaller) -> list[Result]:
        """Play all trials; the executor and the caller are closed on return and on error."""
        with ExitStack() as closing:
            closing.callback(executor.close)
            closing.callback(caller.close)
            if executor.max_live is not None:
                self._max_live = min(self._max_live, executor.max_live)
            while not self.is_over:
                if self.interrupt is not None:
                    self.interrupt()
                self._admit()
                if self._requests and not (caller.is_batched and (self._inputs or self._stepping)):
                    requests, self._requests = self._requests, {}
                    caller.call(requests)
                elif self._inputs:
                    executor.advance(self._inputs)
                else:
                    self._wait()
                if time.monotonic() >= self._check_at:
                    self._handle_posted()  # first handle outcomes that arrived in time
                    self._enforce_limits(executor, caller)
                    self._check_at = self._next_check(executor, caller)
        return [self._results[index] for index in sorted(self._results)]

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the scheduler's thread; the only method that other threads may call."""
        self._inbox.put((function, arguments))

    def expect(self, indices: Iterable[int]) -> None:
        """Wait for the next outcomes of these trials, before a batched agent is called."""
        self._stepping.update(indices)

    def on_outcome(self, index: int, outcome: TrialOutcome) -> None:
        """Handle the outcome of a trial's last input."""
        self._stepping.discard(index)
        if isinstance(outcome, TurnRequest):
            self._turns[index] += 1
            if index in self._pending_errors:
                self._inputs[index] = self._pending_errors.pop(index)
            else:
                self._requests[index] = outcome
        elif isinstance(outcome, Finished):
            self._finish(index, outcome.result)
        else:
            raise outcome.error

    def on_answers(self, answers: Iterable[tuple[int, Action | AgentError]]) -> None:
        """Handle the agent's answers, each with the index of its trial."""
        self._inputs.update(answers)

    def fail_at_next_request(self, index: int, error: EpisodeError) -> None:
        """Throw an error into a trial at its next request, without waiting for that request."""
        self._pending_errors[index] = error
        self._stepping.discard(index)

    def postpone(self, index: int) -> None:
        """Stop waiting for a trial's next outcome, so that a batched agent answers the others."""
        self._stepping.discard(index)

    def resume(self, index: int) -> None:
        """Wait for a trial's next outcome again, unless the trial is going to fail."""
        if index not in self._pending_errors:
            self.expect([index])

    def stop_clock(self, index: int) -> None:
        """Stop the clock of a trial, because no worker is available to start it yet."""
        self._began.pop(index, None)

    def start_clock(self, index: int) -> None:
        """Start the clock of a trial, if it is not running."""
        if self.limits.trial_s is not None:
            self._began.setdefault(index, time.monotonic())

    def timeout_error(self, index: int) -> EnvError:
        """Make the error for a trial whose environment took too long."""
        return EnvError(f"{self._where(index)} the environment took longer than turn_timeout_s = {self.limits.turn_s}")

    def _where(self, index: int) -> str:
        return f"session {self.trials[index].session_id}, turn {max(0, self._turns[index])}:"

    def _admit(self) -> None:
        while self._waiting and self._num_live < self._max_live:
            index = self._waiting.popleft()
            self._num_live += 1
            self._inputs[index] = None
            self.start_clock(index)

    def _finish(self, index: int, result: Result) -> None:
        self._num_live -= 1
        self._began.pop(index, None)
        self._pending_errors.pop(index, None)
        self._results[index] = result
        if self._on_finish is not None:
            self._on_finish(result)

    def _wait(self) -> None:
        """Handle all posted events; if there are none, wait for one, but not beyond the next check of the limits."""
        wait_s = min(_POLL_S, max(0.0, self._check_at - time.monotonic()))
        programs = [one for one in self._stepping if self.trials[one].may_wait] if self._requests else []
        if programs:  # one may wait for another, whose request waits for an answer
            wait_s = min(wait_s, _QUIET_S)
        try:
            function, arguments = self._inbox.get(timeout=wait_s)
        except Empty:
            self._stepping.difference_update(programs)
            return
        function(*arguments)
        self._handle_posted()

    def _handle_posted(self) -> None:
        for _ in range(self._inbox.qsize()):
            function, arguments = self._inbox.get()
            function(*arguments)

    def _next_check(self, executor: Executor, caller: AgentCaller) -> float:
        """Return the earliest time at which a limit may be exceeded; steps that start later exceed theirs later."""
        now = time.monotonic()
        ends: list[float] = []
        if self.limits.turn_s is not None:
            waiting = caller.oldest_request()
            since = [now, *(since for _, since in executor.running()), *([] if waiting is None else [waiting[1]])]
            ends.append(min(since) + self.limits.turn_s)
        if self.limits.trial_s is not None:
            ends.append(next(iter(self._began.values()), now) + self.limits.trial_s)
        return min(ends)

    def _enforce_limits(self, executor: Executor, caller: AgentCaller) -> None:
        """Fail trials and calls that took too long."""
        now, turn, trial = time.monotonic(), self.limits.turn_s, self.limits.trial_s
        if turn is not None:
            while (waiting := caller.oldest_request()) is not None and now - waiting[1] >= turn:
                where = self._where(waiting[0])
                caller.cancel(waiting[0])
                self._inputs[waiting[0]] = AgentError(f"{where} the agent took longer than turn_timeout_s = {turn}")
            for index, since in executor.running():
                if now - since >= turn:
                    error = self.timeout_error(index)
                    self.fail_at_next_request(index, error)
                    executor.abandon(index, error)
        while trial is not None and self._began:
            index, began = next(iter(self._began.items()))
            if now - began < trial:
                break
            del self._began[index]
            self._began[index] = now  # check again later: a step that waits for a worker may yet start and hang
            self._end(index, executor, caller)

    def _end(self, index: int, executor: Executor, caller: AgentCaller) -> None:
        """Fail a trial that ran out of time, whatever it is waiting for."""
        sentence = f"{self._where(index)} the trial took longer than episode_timeout_s = {self.limits.trial_s}"
        if index in self._inputs and self._turns[index] < 0 and self._inputs[index] is None:
            del self._inputs[index]  # nothing was played
            self._finish(index, self.trials[index].abandon(EnvError(sentence)))
        elif index in self._inputs or self._requests.pop(index, None) is not None or caller.cancel(index):
            self._inputs[index] = AgentError(sentence)
        else:
            if index not in self._pending_errors:
                self.fail_at_next_request(index, EnvError(sentence))
            executor.abandon(index, self._pending_errors[index])
