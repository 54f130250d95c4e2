"""Episodes under load: each is advanced somewhere (here, in a thread, in a process) and answered somehow.

::

               ┌────────────── moves ──────────────▶ Stage: advances episodes ─┐
    waiting ─▶ │                                                               ├─▶ on_finish, results
               └─ Asker: asks the agent ◀───────── requests ◀──────────────────┘

Whatever happens on another thread is posted to one inbox and handled on the thread that called ``drive``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from agentsgym.errors import AgentFault, EnvironmentFault, EpisodeFault
from agentsgym.types import Action, TurnRequest

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Playing = Generator[TurnRequest, Action, Result]
Move = Action | EpisodeFault | None  # what an episode is given: an answer, a fault to end it, None to start it

SLICE_S = 0.001  # how long finished steps may wait for others, to be handed on together


class Episode(Protocol[Result_co]):
    """What is played.

    Attributes:
        session_id: Names it in messages.
        env: What many episodes have in common; a process pool sends it to each worker once.
    """

    session_id: str
    env: Any

    def play(self) -> Generator[TurnRequest, Action, Result_co]:
        """Begin it: a generator that yields requests and receives actions, or a fault thrown into it."""
        ...

    def abandon(self, fault: EpisodeFault) -> Result_co:
        """What it came to, where its generator cannot be advanced any more (and may still be running)."""
        ...


class Finished(NamedTuple):
    """An episode is over."""

    result: Any


class Raised(NamedTuple):
    """An episode raised what is no episode's fault; it ends the run."""

    error: BaseException


Outcome = TurnRequest | Finished | Raised


def advance(playing: Playing[Any], move: Move) -> Outcome:
    """Let an episode go on to its next request or its end."""
    try:
        return playing.throw(move) if isinstance(move, EpisodeFault) else playing.send(move)  # type: ignore[arg-type]  # None starts it
    except StopIteration as stop:
        return Finished(stop.value)
    except BaseException as error:  # noqa: BLE001  # raised again where the run is ended
        return Raised(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Wall times in seconds; None is no limit.

    Attributes:
        turn_s: One call of an environment between two answers, and one answer of an async agent.
        episode_s: A whole episode.
    """

    turn_s: float | None = None
    episode_s: float | None = None


class Desk(Protocol):
    """What stages and askers use of the scheduler."""

    episodes: Sequence[Episode[Any]]
    limits: Limits

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have a function called on the scheduler's thread; the one method to be called from others."""
        ...

    def stepped(self, index: int, outcome: Outcome) -> None:
        """Take what an episode came to with its move."""
        ...

    def answered(self, index: int, answer: Action | AgentFault) -> None:
        """Take what the agent answered."""
        ...

    def condemn(self, index: int, fault: EpisodeFault) -> None:
        """Have a fault thrown into an episode at its next request."""
        ...

    def late(self, index: int) -> EnvironmentFault:
        """The fault of an episode whose environment took too long."""
        ...


class Stage(Protocol):
    """Where episodes are advanced."""

    def advance(self, moves: dict[int, Move]) -> None:
        """Begin with the moves, taken out of ``moves``, or with as many as make sense now."""
        ...

    def running(self) -> list[tuple[int, float]]:
        """The episodes whose step runs at this moment, and since when (on the monotonic clock)."""
        ...

    def abandon(self, index: int, fault: EpisodeFault) -> None:
        """Stop waiting for a step that runs or is to run: its place is free soon, its episode comes to an end."""
        ...

    def close(self) -> None:
        """End every episode that is still in play."""
        ...


class Asker(Protocol):
    """How the agent is asked.

    Attributes:
        together: Whether it is asked for all live episodes at once.
    """

    together: bool

    def ask(self, requests: dict[int, TurnRequest]) -> None:
        """Ask for these episodes."""
        ...

    def oldest(self) -> tuple[int, float] | None:
        """The episode that has waited longest for its answer, and since when."""
        ...

    def cancel(self, index: int) -> bool:
        """Want no answer any more; returns whether there was one to come."""
        ...

    def close(self) -> None:
        """Want no answer to anything any more."""
        ...


class Inline:
    """Advances episodes on the scheduler's own thread, where a step cannot be interrupted."""

    def __init__(self, desk: Desk, playing: Sequence[Playing[Any]]) -> None:
        self._desk = desk
        self._playing = playing

    def advance(self, moves: dict[int, Move]) -> None:
        """Take a slice of the moves, so that a fast episode's request does not wait for all the others' steps."""
        start = now = time.monotonic()
        limit = self._desk.limits.turn_s
        while moves and now - start < SLICE_S:
            index = next(iter(moves))
            outcome = advance(self._playing[index], moves.pop(index))
            began, now = now, time.monotonic()
            if limit is not None and now - began > limit and not isinstance(outcome, Raised):
                self._playing[index].close()
                outcome = Finished(self._desk.episodes[index].abandon(self._desk.late(index)))
            self._desk.stepped(index, outcome)

    def running(self) -> list[tuple[int, float]]:
        """None, seen from outside of :meth:`advance`."""
        return []

    def abandon(self, index: int, fault: EpisodeFault) -> None:
        """Do nothing: no step runs."""

    def close(self) -> None:
        """Close every generator; one that is over does not mind."""
        for playing in self._playing:
            playing.close()


class Scheduler(Generic[Result]):
    """Takes every episode to its end, in any order, one turn after the other.

    Attributes:
        episodes: What is played.
        limits: Wall times.
    """

    def __init__(
        self,
        episodes: Sequence[Episode[Result]],
        *,
        limits: Limits,
        max_concurrent: int | None,
        on_finish: Callable[[Result], None] | None,
    ) -> None:
        self.episodes = episodes
        self.limits = limits
        self._max_live = len(episodes) if max_concurrent is None else max_concurrent
        self._on_finish = on_finish
        self._waiting = deque(range(len(episodes)))
        self._turns = [-1] * len(episodes)  # before the first request
        self._began: dict[int, float] = {}  # when it began or was last found too old; in that order, as dicts are
        self._moves: dict[int, Move] = {}
        self._stepping: set[int] = set()
        self._requests: dict[int, TurnRequest] = {}
        self._condemned: dict[int, EpisodeFault] = {}
        self._num_live = 0
        self._check_at = math.inf if limits == Limits() else 0.0
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._results: dict[int, Result] = {}

    def run(self, stage: Stage, asker: Asker) -> list[Result]:
        """Play; on any way out, stage and asker are closed."""
        with ExitStack() as closing:
            closing.callback(stage.close)
            closing.callback(asker.close)
            while len(self._results) < len(self.episodes):
                self._admit()
                if self._requests and not (asker.together and (self._moves or self._stepping)):
                    requests, self._requests = self._requests, {}
                    asker.ask(requests)
                elif self._moves:
                    self._stepping.update(self._moves)
                    stage.advance(self._moves)
                    self._stepping.difference_update(self._moves)  # those it left for later
                else:
                    self._wait()
                if time.monotonic() >= self._check_at:
                    self._hear()  # what came in time is not late because nobody has looked
                    self._enforce(stage, asker)
                    self._check_at = self._next_check(stage, asker)
        return [self._results[index] for index in range(len(self.episodes))]

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have a function called on the scheduler's thread; the one method to be called from others."""
        self._inbox.put((function, arguments))

    def stepped(self, index: int, outcome: Outcome) -> None:
        """Take what an episode came to with its move."""
        self._stepping.discard(index)
        if isinstance(outcome, TurnRequest):
            self._turns[index] += 1
            if index in self._condemned:
                self._moves[index] = self._condemned.pop(index)
            else:
                self._requests[index] = outcome
        elif isinstance(outcome, Finished):
            self._finish(index, outcome.result)
        else:
            raise outcome.error

    def answered(self, index: int, answer: Action | AgentFault) -> None:
        """Take what the agent answered."""
        self._moves[index] = answer

    def condemn(self, index: int, fault: EpisodeFault) -> None:
        """Have a fault thrown into an episode at its next request, for which nobody else waits."""
        self._condemned[index] = fault
        self._stepping.discard(index)

    def late(self, index: int) -> EnvironmentFault:
        """The fault of an episode whose environment took too long."""
        return EnvironmentFault(f"{self._where(index)} its environment took longer than {self._turn_limit()}")

    def _where(self, index: int) -> str:
        return f"session {self.episodes[index].session_id}, turn {max(0, self._turns[index])}:"

    def _turn_limit(self) -> str:
        return f"turn_timeout_s = {self.limits.turn_s}"

    def _admit(self) -> None:
        while self._waiting and self._num_live < self._max_live:
            index = self._waiting.popleft()
            self._num_live += 1
            self._moves[index] = None
            if self.limits.episode_s is not None:
                self._began[index] = time.monotonic()

    def _finish(self, index: int, result: Result) -> None:
        self._num_live -= 1
        self._began.pop(index, None)
        self._condemned.pop(index, None)
        self._results[index] = result
        if self._on_finish is not None:
            self._on_finish(result)

    def _wait(self) -> None:
        """Handle everything that was posted; if nothing was, wait for it, until limits are to be checked."""
        patience_s = None if math.isinf(self._check_at) else max(0.0, self._check_at - time.monotonic())
        try:
            function, arguments = self._inbox.get(timeout=patience_s)
        except Empty:
            return
        function(*arguments)
        self._hear()

    def _hear(self) -> None:
        """Handle everything that was posted so far."""
        for _ in range(self._inbox.qsize()):
            function, arguments = self._inbox.get()
            function(*arguments)

    def _next_check(self, stage: Stage, asker: Asker) -> float:
        """When a limit may be passed for the first time from now on: what begins later has all its time before it."""
        now = time.monotonic()
        ends: list[float] = []
        if self.limits.turn_s is not None:
            asked = asker.oldest()
            since = [now, *(since for _, since in stage.running()), *([] if asked is None else [asked[1]])]
            ends.append(min(since) + self.limits.turn_s)
        if self.limits.episode_s is not None:
            ends.append(next(iter(self._began.values()), now) + self.limits.episode_s)
        return min(ends)

    def _enforce(self, stage: Stage, asker: Asker) -> None:
        """End what took too long."""
        now, turn, episode = time.monotonic(), self.limits.turn_s, self.limits.episode_s
        if turn is not None:
            while (asked := asker.oldest()) is not None and now - asked[1] >= turn:
                where = self._where(asked[0])
                asker.cancel(asked[0])
                self._moves[asked[0]] = AgentFault(f"{where} the agent took longer than {self._turn_limit()}")
            for index, since in stage.running():
                if now - since >= turn:
                    fault = self.late(index)
                    self.condemn(index, fault)
                    stage.abandon(index, fault)
        while episode is not None and self._began:
            index, began = next(iter(self._began.items()))
            if now - began < episode:
                break
            del self._began[index]
            self._began[index] = now  # its step may hang only after this, as one that waits for a worker may
            self._end(index, stage, asker)

    def _end(self, index: int, stage: Stage, asker: Asker) -> None:
        """Let an episode that is too old fail, wherever it is."""
        sentence = f"{self._where(index)} the episode took longer than episode_timeout_s = {self.limits.episode_s}"
        if index in self._moves and self._turns[index] < 0 and self._moves[index] is None:
            del self._moves[index]  # nothing was played
            self._finish(index, self.episodes[index].abandon(EnvironmentFault(sentence)))
        elif index in self._moves or self._requests.pop(index, None) is not None or asker.cancel(index):
            self._moves[index] = AgentFault(sentence)
        else:
            if index not in self._condemned:
                self.condemn(index, EnvironmentFault(sentence))
            stage.abandon(index, self._condemned[index])
