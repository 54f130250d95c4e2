"""Play many episodes at once: each is a generator that yields a request and receives an action."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from agentsgym.errors import AgentFault, ConfigError, EpisodeFault
from agentsgym.rollouts.asking import Actor, Apart, Together, ask
from agentsgym.rollouts.pools import Pool
from agentsgym.rollouts.scheduler import Episode, Inline, Limits, Playing, Scheduler
from agentsgym.types import Action, TurnRequest

Result = TypeVar("Result")


def drive(  # noqa: PLR0913  # keywords, most of them left out
    episodes: Iterable[Episode[Result] | Playing[Result]],
    actor: Actor,
    *,
    max_concurrent: int | None = None,
    on_finish: Callable[[Result], None] | None = None,
    pool: Pool | None = None,
    turn_timeout_s: float | None = None,
    episode_timeout_s: float | None = None,
) -> list[Result]:
    """Take all episodes to their ends, many at once, and return their results in the order given.

    An agent that answers in batches is asked once a round for all live episodes. One that answers with coroutines
    (``async def aact``) is asked for each episode as soon as that episode's own step is done. A fault of the agent is
    thrown into its own episode, which decides what becomes of it; the others go on. What is played does not depend on
    how the agent is asked or where the environments run.

    A limit of time ends an episode with a fault, and the others go on at once. What runs in a pool is given up; what
    runs on this thread cannot be interrupted, so that there the limit is noticed when the environment's call returns.
    The call of an agent that answers in batches counts for the limit of an episode, not for that of a turn.

    Args:
        episodes: What is played; also generators that have not been started, where there is no pool and no limit.
        actor: Answers the requests.
        max_concurrent: How many episodes are live at most; None for all of them.
        on_finish: Called with each result as soon as it is there, on the calling thread.
        pool: Where the environments run: a :class:`~agentsgym.rollouts.pools.ThreadPool`, a
            :class:`~agentsgym.rollouts.processes.ProcessPool`, or None for the calling thread.
        turn_timeout_s: Wall time of one call of an environment between two answers, and of one answer of an agent
            that answers with coroutines; None for no limit.
        episode_timeout_s: Wall time of an episode, its waits for a thread or process that is free included; None for no
            limit.

    Raises:
        ConfigError: A setting is not valid, the environment cannot be sent to the pool's processes, or the agent says
            that it cannot play here at all.
    """
    if max_concurrent is not None and not _is_positive_int(max_concurrent):
        raise ConfigError(f"max_concurrent must be a positive int or None, got {max_concurrent!r}")
    limits = Limits(
        turn_s=_seconds("turn_timeout_s", turn_timeout_s), episode_s=_seconds("episode_timeout_s", episode_timeout_s)
    )
    is_async = callable(getattr(actor, "aact", None))
    try:
        if pool is None and limits == Limits() and not is_async:
            return _lockstep(episodes, actor, max_concurrent, on_finish)
        plays = [_episode(episode, is_bare_allowed=pool is None and limits == Limits()) for episode in episodes]
        scheduler = Scheduler(plays, limits=limits, max_concurrent=max_concurrent, on_finish=on_finish)
        stage = Inline(scheduler, [episode.play() for episode in plays]) if pool is None else pool.stage(scheduler)
        return scheduler.run(stage, Apart(scheduler, actor) if is_async else Together(scheduler, actor))
    finally:
        actor.finish()


def _lockstep(
    episodes: Iterable[Episode[Result] | Playing[Result]],
    actor: Actor,
    max_concurrent: int | None,
    on_finish: Callable[[Result], None] | None,
) -> list[Result]:
    """Advance all episodes together, one turn a round: the scheduler's way where nothing has to be waited for."""
    waiting = list(enumerate(map(_generator, episodes)))[::-1]
    table = _Table(dict(waiting), on_finish)
    try:
        while waiting or table.live:
            while waiting and (max_concurrent is None or len(table.live) < max_concurrent):
                table.advance(waiting.pop()[0], None)
            indices, answers = table.live, ask(actor, table.requests)
            table.live, table.requests = [], []
            for index, answer in zip(indices, answers, strict=True):
                table.advance(index, answer)
    finally:
        table.close()
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
            request = episode.throw(answer) if isinstance(answer, EpisodeFault) else episode.send(answer)
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


class _Bare(Generic[Result]):
    """A generator as an episode that is never abandoned."""

    env: Any = None

    def __init__(self, playing: Playing[Result]) -> None:
        self.playing = playing
        self.session_id = ""

    def play(self) -> Playing[Result]:
        return self.playing

    def abandon(self, fault: EpisodeFault) -> Result:
        raise fault


def _generator(episode: Episode[Result] | Playing[Result]) -> Playing[Result]:
    return episode if isinstance(episode, Generator) else episode.play()


def _episode(episode: Episode[Result] | Playing[Result], *, is_bare_allowed: bool) -> Episode[Result]:
    if not isinstance(episode, Generator):
        return episode
    if not is_bare_allowed:
        raise ConfigError("a pool or a limit of time needs episodes with play() and abandon(fault), got a generator")
    return _Bare(episode)


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _seconds(name: str, value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):
        raise ConfigError(f"{name} must be a positive number of seconds or None, got {value!r}")
    return value
