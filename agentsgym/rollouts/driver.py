"""Play many trials at once: each is a generator that yields a request and receives an action."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic

from agentsgym.errors import AgentError, ConfigError, EpisodeError
from agentsgym.fields import is_int, is_positive_number, or_none, require
from agentsgym.rollouts.agent_calls import AgentLike, BatchCaller, ConcurrentCaller, call_agent, finish_agent
from agentsgym.rollouts.interfaces import Executor, PlayableTrial, Pool, Result, TimeLimits, TrialGenerator
from agentsgym.rollouts.scheduler import InlineExecutor, Scheduler
from agentsgym.types import Action, TurnRequest


def drive(  # noqa: PLR0913  # keywords, most of them left out
    trials: Iterable[PlayableTrial[Result] | TrialGenerator[Result]],
    agent: AgentLike,
    *,
    max_concurrent: int | None = None,
    on_finish: Callable[[Result], None] | None = None,
    pool: Pool | None = None,
    turn_timeout_s: float | None = None,
    episode_timeout_s: float | None = None,
    interrupt: Callable[[], None] | None = None,
) -> list[Result]:
    """Take all trials to their ends, many at once, and return their results in the order given.

    An agent that answers in batches is called once a round for all live trials. One that answers with coroutines
    (``async def aact``) is called for each trial as soon as that trial's own step is done. An error of the agent is
    thrown into its own trial, which decides how to handle it; the others continue. What is played does not depend on
    how the agent is called or where the environments run.

    A time limit ends a trial with an error; the others continue. What runs in a pool is given up; what runs on
    this thread cannot be interrupted, so that there the limit is noticed when the environment's call returns. The call
    of an agent that answers in batches counts toward the limit of a trial, not toward that of a turn.

    Args:
        trials: The trials to play; also generators, not started yet, without a pool and a time limit.
        agent: Answers the requests.
        max_concurrent: The most trials that are live at once; None for all of them.
        on_finish: Called with each result as soon as it is there, on the calling thread.
        pool: Where the environments run: an ``EnvThreadPool``, an ``EnvProcessPool``, or None for the calling thread.
        turn_timeout_s: Wall time of one call of an environment between two answers, and of one answer of an agent
            that answers with coroutines; None for no limit.
        episode_timeout_s: Wall time of a whole trial, its waits for a free thread or process included; None for none.
        interrupt: Called between turns, and in waits a few times a second; what it raises ends all and is raised here.

    Raises:
        ConfigError: A setting is not valid, the environment cannot be sent to the pool's processes, or the agent
            reports that it cannot play here at all. What was finished before has been given to ``on_finish``.
    """
    require("max_concurrent", max_concurrent, or_none(is_int(1)), "a positive int or None")
    for name, limit in (("turn_timeout_s", turn_timeout_s), ("episode_timeout_s", episode_timeout_s)):
        require(name, limit, or_none(is_positive_number), "a positive number of seconds or None")
    limits = TimeLimits(turn_s=turn_timeout_s, trial_s=episode_timeout_s)
    caller = ConcurrentCaller if callable(getattr(agent, "aact", None)) else BatchCaller
    try:
        if pool is None and limits == TimeLimits() and caller is BatchCaller:
            return _lockstep(trials, agent, max_concurrent, on_finish, interrupt)
        playable = [_playable(trial, is_bare_allowed=pool is None and limits == TimeLimits()) for trial in trials]
        scheduler = Scheduler(
            playable, limits=limits, max_concurrent=max_concurrent, on_finish=on_finish, interrupt=interrupt
        )
        return scheduler.run(executor_of(scheduler, pool), caller(scheduler, agent))
    finally:
        finish_agent(agent)


def executor_of(scheduler: Scheduler[Result], pool: Pool | None) -> Executor:
    """The executor that advances a scheduler's trials: a pool's, or one on its own thread."""
    if pool is not None:
        return pool.begin_run(scheduler)
    return InlineExecutor(scheduler)


def _lockstep(
    trials: Iterable[PlayableTrial[Result] | TrialGenerator[Result]],
    agent: AgentLike,
    max_concurrent: int | None,
    on_finish: Callable[[Result], None] | None,
    interrupt: Callable[[], None] | None,
) -> list[Result]:
    """Advance all trials together, one turn a round: as the scheduler does, and faster, as nothing is waited for."""
    generators = [trial if isinstance(trial, Generator) else trial.play() for trial in trials]
    waiting = list(enumerate(generators))[::-1]
    run = _LockstepRun(dict(waiting), on_finish, interrupt)
    try:
        while waiting or run.live:
            while waiting and (max_concurrent is None or len(run.live) < max_concurrent):
                run.advance(waiting.pop()[0], None)
            indices, answers = run.live, call_agent(agent, run.requests)
            run.live, run.requests = [], []
            for index, answer in zip(indices, answers, strict=True):
                run.advance(index, answer)
    finally:
        for generator in run.unfinished.values():
            generator.close()  # so that its session is dropped
    return [run.results[index] for index in sorted(run.results)]


class _LockstepRun(Generic[Result]):
    """The live trials, and the results of those that are over."""

    def __init__(
        self,
        unfinished: dict[int, TrialGenerator[Result]],
        on_finish: Callable[[Result], None] | None,
        interrupt: Callable[[], None] | None,
    ) -> None:
        self.unfinished = unfinished
        self.on_finish = on_finish
        self.interrupt = interrupt
        self.live: list[int] = []
        self.requests: list[TurnRequest] = []
        self.results: dict[int, Result] = {}

    def advance(self, index: int, answer: Action | AgentError | None) -> None:
        """Give one trial its answer (None to start it), and keep its next request or its result."""
        if self.interrupt is not None:
            self.interrupt()
        generator: Any = self.unfinished[index]
        try:
            request = generator.throw(answer) if isinstance(answer, EpisodeError) else generator.send(answer)
        except StopIteration as stop:
            del self.unfinished[index]
            self.results[index] = stop.value
            if self.on_finish is not None:
                self.on_finish(stop.value)
        else:
            self.live.append(index)
            self.requests.append(request)


class _BareTrial(Generic[Result]):
    """A generator as a trial that is never abandoned."""

    env: Any = None

    def __init__(self, generator: TrialGenerator[Result]) -> None:
        self.generator = generator
        self.session_id = ""

    def play(self) -> TrialGenerator[Result]:
        return self.generator

    def abandon(self, error: EpisodeError, /) -> Result:
        raise error


def _playable(trial: PlayableTrial[Result] | TrialGenerator[Result], *, is_bare_allowed: bool) -> PlayableTrial[Result]:
    if not isinstance(trial, Generator):
        return trial
    if not is_bare_allowed:
        raise ConfigError("a pool or a time limit needs trials with play() and abandon(error), got a generator")
    return _BareTrial(trial)
