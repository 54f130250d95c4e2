"""Types shared by the parts of a run: trials, their inputs and outcomes, executors and agent callers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from agentsgym.errors import EpisodeError
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


class Executor(Protocol):
    """Advances the trials of one run.

    Attributes:
        max_live: Maximum number of live trials; None for any number.
    """

    max_live: int | None

    def advance(self, inputs: dict[int, Input]) -> None:
        """Process some or all of the inputs, or start to, and remove these from ``inputs``.

        Before the scheduler can go on, it needs to know the trials whose steps continue elsewhere:
        :meth:`~agentsgym.rollouts.scheduler.Scheduler.expect`.
        """
        ...

    def running(self) -> list[tuple[int, float]]:
        """The trials whose step is running, and since when (on the monotonic clock)."""
        ...

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Stop waiting for a running or queued step: its worker becomes free soon, and its trial ends."""
        ...

    def close(self) -> None:
        """End every live trial."""
        ...


class AgentCaller(Protocol):
    """Calls the agent.

    Attributes:
        is_batched: Whether the agent is called once for all live trials.
    """

    is_batched: bool

    def call(self, requests: dict[int, TurnRequest]) -> None:
        """Call the agent with the requests of these trials."""
        ...

    def oldest_request(self) -> tuple[int, float] | None:
        """The trial that has waited longest for its answer, and since when."""
        ...

    def cancel(self, index: int) -> bool:
        """Drop the answer that a trial waits for; return whether it waited for one."""
        ...

    def close(self) -> None:
        """Drop every pending answer."""
        ...
