"""Play many trials concurrently: each is a generator that yields requests and receives actions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Generic

from agentsgym.agents.base import Agent, finish_agent
from agentsgym.errors import ConfigError, EpisodeError
from agentsgym.fields import is_int, is_positive_number, or_none, require
from agentsgym.rollouts.agent_calls import BatchCaller, ConcurrentCaller
from agentsgym.rollouts.interfaces import PlayableTrial, Result, TimeLimits, TrialGenerator
from agentsgym.rollouts.loop_executor import OwnExecutor
from agentsgym.rollouts.scheduler import Pool, Scheduler


def drive(  # noqa: PLR0913  # keywords, most of them usually omitted
    trials: Iterable[PlayableTrial[Result] | TrialGenerator[Result]],
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
        trials: The trials to play; without a pool and a time limit, they may also be unstarted generators.
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
    caller = ConcurrentCaller if callable(getattr(agent, "aact", None)) else BatchCaller
    try:
        playable: list[PlayableTrial[Result]] = []
        for trial in trials:
            if isinstance(trial, Generator) and not (pool is None and limits == TimeLimits()):
                raise ConfigError(
                    "a pool or a time limit requires trials with play() and abandon(error), got a generator"
                )
            playable.append(_BareTrial(trial) if isinstance(trial, Generator) else trial)
        scheduler = Scheduler(
            playable, limits=limits, max_concurrent=max_concurrent, on_finish=on_finish, interrupt=interrupt
        )
        executor = OwnExecutor(scheduler) if pool is None else pool.begin_run(scheduler)
        return scheduler.run(executor, caller(scheduler, agent))
    finally:
        finish_agent(agent)


class _BareTrial(Generic[Result]):
    """A trial that wraps a generator and is never abandoned."""

    env: Any = None
    may_wait = False

    def __init__(self, generator: TrialGenerator[Result]) -> None:
        self.generator = generator
        self.session_id = ""

    def play(self) -> TrialGenerator[Result]:
        return self.generator

    def abandon(self, error: EpisodeError, /) -> Result:
        raise error
