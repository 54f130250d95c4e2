"""Types between the parts of a run: trials, their inputs and outcomes, executors and agent callers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from agentsgym.errors import EpisodeError
from agentsgym.types import Action, TurnRequest

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
TrialGenerator = Generator[TurnRequest, Action, Result]
Input = Action | EpisodeError | None  # of a trial: an answer, an error to end it, None to start it

BATCHING_WINDOW_S = 0.001  # how long a finished step may wait for others, so that they are handed on together
GRACE_S = 5.0  # how long what still runs may take to end when a run is aborted


class PlayableTrial(Protocol[Result_co]):
    """One trial, as the driver sees it.

    Attributes:
        session_id: Names it in messages.
        env: The environment that trials share; a process pool sends it to each worker once.
    """

    session_id: str
    env: Any

    def play(self) -> Generator[TurnRequest, Action, Result_co]:
        """Start it: a generator that yields requests and receives actions, or an error thrown into it."""
        ...

    def abandon(self, error: EpisodeError, /) -> Result_co:
        """Make the result of a trial whose generator cannot be advanced any more (and may still be running)."""
        ...


class Finished(NamedTuple):
    """A trial is over."""

    result: Any


class Raised(NamedTuple):
    """A trial raised an error that is not its own failure; it ends the run."""

    error: BaseException


TrialOutcome = TurnRequest | Finished | Raised


def advance(generator: TrialGenerator[Any], given: Input) -> TrialOutcome:
    """Advance a trial to its next request or its end."""
    try:
        return generator.throw(given) if isinstance(given, EpisodeError) else generator.send(given)  # type: ignore[arg-type]  # None starts it
    except StopIteration as stop:
        return Finished(stop.value)
    except BaseException as error:  # noqa: BLE001  # raised again where the run is ended
        return Raised(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Wall times in seconds; None for no limit.

    Attributes:
        turn_s: One call of an environment between two answers, and one answer of an async agent.
        trial_s: A whole trial, from its first episode to its last (``episode_timeout_s`` of a rollout).
    """

    turn_s: float | None = None
    trial_s: float | None = None


class Executor(Protocol):
    """Where the trials of one run are advanced.

    Attributes:
        max_live: Maximum number of live trials; None for any number.
    """

    max_live: int | None

    def advance(self, inputs: dict[int, Input]) -> None:
        """Start on the inputs, taken out of ``inputs``, or on as many as make sense now."""
        ...

    def running(self) -> list[tuple[int, float]]:
        """The trials whose step runs at this moment, and since when (on the monotonic clock)."""
        ...

    def abandon(self, index: int, error: EpisodeError) -> None:
        """Stop waiting for a step that runs or is to run: its worker is free soon, its trial comes to an end."""
        ...

    def close(self) -> None:
        """End every live trial."""
        ...


class AgentCaller(Protocol):
    """How the agent is called.

    Attributes:
        is_batched: Whether it is called for all live trials at once.
    """

    is_batched: bool

    def call(self, requests: dict[int, TurnRequest]) -> None:
        """Call the agent with the requests of these trials."""
        ...

    def oldest(self) -> tuple[int, float] | None:
        """The trial that has waited longest for its answer, and since when."""
        ...

    def cancel(self, index: int) -> bool:
        """Drop the answer that a trial waits for; returns whether it waited for one."""
        ...

    def close(self) -> None:
        """Drop every answer that is still to come."""
        ...
