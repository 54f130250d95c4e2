"""Play many episodes at once: each is a generator that yields a request and receives an action."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from agentsgym.errors import AgentFault, ConfigError
from agentsgym.types import Action, TurnRequest

Result = TypeVar("Result")
Playing = Generator[TurnRequest, Action, Result]


class Actor(Protocol):
    """What the driver needs of an agent."""

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
        """Answer the requests in order; a fault stands for a session that cannot be answered."""
        ...

    def finish(self) -> None:
        """Learn that no episode is live any more."""
        ...


def drive(
    episodes: Iterable[Playing[Result]],
    actor: Actor,
    *,
    max_concurrent: int | None = None,
    on_finish: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Advance all episodes together, one turn a round, and return their results in the order given.

    Each round asks ``actor`` once for all live episodes. A fault of the agent is thrown into its own episode, which
    decides what becomes of it; the others go on.

    Args:
        episodes: Generators that have not been started.
        actor: Answers the requests.
        max_concurrent: How many episodes are live at most; None for all of them.
        on_finish: Called with each result as soon as it is there.

    Raises:
        ConfigError: ``max_concurrent`` is no positive int, or the agent says that it cannot play here at all.
    """
    if max_concurrent is not None and not _is_positive_int(max_concurrent):
        raise ConfigError(f"max_concurrent must be a positive int or None, got {max_concurrent!r}")
    waiting = list(enumerate(episodes))[::-1]
    table = _Table(dict(waiting), on_finish)
    try:
        while waiting or table.live:
            while waiting and (max_concurrent is None or len(table.live) < max_concurrent):
                table.advance(waiting.pop()[0], None)
            indices, answers = table.live, _ask(actor, table.requests)
            table.live, table.requests = [], []
            for index, answer in zip(indices, answers, strict=True):
                table.advance(index, answer)
    finally:
        table.close()
        actor.finish()
    return [table.results[index] for index in sorted(table.results)]


class _Table(Generic[Result]):
    """The episodes in play and what those that are over came to."""

    def __init__(self, unfinished: dict[int, Playing[Result]], on_finish: Callable[[Result], None] | None) -> None:
        self.unfinished = unfinished
        self.on_finish = on_finish
        self.live: list[int] = []
        self.requests: list[TurnRequest] = []
        self.results: dict[int, Result] = {}

    def advance(self, index: int, answer: Action | AgentFault | None) -> None:
        """Give one episode its answer (None to start it) and note what it asks next, or its result."""
        episode: Any = self.unfinished[index]
        try:
            request = episode.throw(answer) if isinstance(answer, AgentFault) else episode.send(answer)
        except StopIteration as stop:
            del self.unfinished[index]
            self.results[index] = stop.value
            if self.on_finish is not None:
                self.on_finish(stop.value)
        else:
            self.live.append(index)
            self.requests.append(request)

    def close(self) -> None:
        """End what is still in play, so that its sessions are dropped."""
        for episode in self.unfinished.values():
            episode.close()


def _ask(actor: Actor, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
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
            return [*_ask(actor, requests[:half]), *_ask(actor, requests[half:])]
        fault = AgentFault(f"{type(actor).__name__}.act raised {error!r}\n{traceback.format_exc()}")
        return [fault]
    if not isinstance(answers, Sequence) or len(cast("Sequence[Any]", answers)) != len(requests):
        wanted = f"{type(actor).__name__}.act must return one Action a request"
        given = f"{len(requests)} requests, got {_shortened(cast('object', answers))}"
        return [AgentFault(f"{wanted}: {given}") for _ in requests]
    return cast("Sequence[Action | AgentFault]", answers)


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shortened(value: object, width: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[:width]}…"
