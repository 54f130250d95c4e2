"""Play trials to their ends, and retry failed ones as a policy allows; or play one by hand, step by step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.envs.contract import PlayableEnv
from agentsgym.envs.finished import FinishedRollouts
from agentsgym.envs.trial import Trial
from agentsgym.errors import ConfigError, EnvError
from agentsgym.failures import FailureCount, FailureLog, FailurePolicy
from agentsgym.rollouts.driver import drive
from agentsgym.texts import shown
from agentsgym.types import Action, Message, StopReason, Trajectory, TurnRequest

logger = logging.getLogger(__name__)

OnFinish = Callable[[Trajectory], None]


def limit_context(trials: Sequence[Trial], agent: Any) -> None:
    """Let trials that have not started end where the agent's context is full."""
    context = getattr(agent, "context_length", None)
    for trial in trials:
        if trial.budget.context != context:
            trial.budget = dataclasses.replace(trial.budget, context=context)


def prepare_play(
    trials: Sequence[Trial], *, max_concurrent: int | None = None, pool: Any = None, num_live: int | None = None
) -> None:
    """Let the environments of trials prepare for the number of concurrent episodes.

    Args:
        trials: The trials, not started yet.
        max_concurrent: Maximum number of live trials; None for all of them.
        pool: The pool that will run them.
        num_live: Number of concurrent trials of an environment if more will follow; None if these are all.

    Raises:
        ConfigError: An environment cannot play that many episodes concurrently.
    """
    limits = [limit for limit in (max_concurrent, getattr(pool, "max_live", None)) if isinstance(limit, int)]
    tasks: dict[int, tuple[PlayableEnv, list[Mapping[str, Any]]]] = {}
    for trial in trials:
        tasks.setdefault(id(trial.env), (trial.env, []))[1].append(trial.task_data)
    for env, env_tasks in tasks.values():
        env._prepare_play(env_tasks, min([num_live or len(env_tasks), *limits]))  # pyright: ignore[reportPrivateUsage]


def retry_of(trial: Trial, policy: FailurePolicy) -> Trial:
    """Return the next attempt of a failed trial; ``trial.seed`` is the seed of the failed attempt."""
    attempt = trial.num_retries + 1
    seed = policy.seed_of_retry(trial.seed, attempt)
    return dataclasses.replace(trial, seed=seed, task_data={**trial.task_data, "seed": seed}, num_retries=attempt)


class TrialRounds:
    """Plays trials in rounds: first all of them, then the failed ones again, as often as a policy allows.

    Attributes:
        pending: The trials of the next round, not started yet.
        num_played: Number of rounds played so far.
    """

    def __init__(
        self, trials: Sequence[Trial], policy: FailurePolicy, log: FailureLog, on_finish: OnFinish | None = None
    ) -> None:
        """Set up the first round.

        Args:
            trials: The trials, not started yet.
            policy: The number of retries of a failed trial.
            log: Receives every failure, including those of trials that are retried.
            on_finish: Called with the last attempt of each trial as soon as it is finished.
        """
        self.pending: list[Trial] = [*trials]
        self.num_played = 0
        self._policy = policy
        self._log = log
        self._on_finish = on_finish
        self._trials = {trial.session_id: (place, trial) for place, trial in enumerate(trials)}
        self._results: dict[int, Trajectory] = {}  # by place
        self._finished = FinishedRollouts(self._report)

    @property
    def trajectories(self) -> list[Trajectory]:
        """The last attempt of each trial, in the order of the trials."""
        return [self._results[place] for place in sorted(self._results)]

    def play(self, agent: Agent, **options: Any) -> None:
        """Play one round; this calls the agent's ``finish``, even if no trial is pending.

        Args:
            agent: The agent that acts.
            **options: See :func:`~agentsgym.rollouts.driver.drive`.
        """
        trials = self.pending
        for trial in trials:
            trial.failures = self._log
        limit_context(trials, agent)
        try:
            prepare_play(trials, max_concurrent=options.get("max_concurrent"), pool=options.get("pool"))
            if not self.num_played:
                self._finished.expect(trials, agent)
        except BaseException:
            drive([], agent)  # the agents of other ranks may run in lockstep and wait for this one
            raise
        self.pending = []
        try:
            drive(trials, agent, on_finish=self._add, **options)
            self._finished.wait(options.get("interrupt"))
        except BaseException:
            self._finished.close()
            raise
        self.num_played += 1
        if not self.pending:
            self._finished.close()
        self.pending.sort(key=lambda trial: self._trials[trial.session_id][0])

    def _add(self, trajectory: Trajectory) -> None:
        _, trial = self._trials[trajectory.session_id]
        self._finished.add(trial.env, trajectory, may_retry=self.num_played < self._policy.max_retries)

    def _report(self, trajectory: Trajectory, may_retry: bool) -> None:
        self._log.note(trajectory)
        place, trial = self._trials[trajectory.session_id]
        self._results[place] = trajectory
        if trajectory.failed and may_retry:
            trial = retry_of(trial, self._policy)
            self._trials[trial.session_id] = place, trial
            self.pending.append(trial)
        elif self._on_finish is not None:
            self._on_finish(trajectory)


def play(
    trials: Sequence[Trial],
    agent: Agent,
    policy: FailurePolicy | None = None,
    *,
    on_finish: OnFinish | None = None,
    finished_before: Sequence[Trajectory] = (),
    log: FailureLog | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Play trials to their ends; log each kind of failure once, and the number of repetitions at the end.

    Args:
        trials: The trials, not started yet.
        agent: The agent that acts.
        policy: How often failed rollouts are retried, and how many may fail; by default, no retries and no limit.
        on_finish: Called with the last attempt of each trial as soon as it is finished.
        finished_before: Rollouts of the same run that were finished earlier; they count toward the limit.
        log: A log shared by several calls, which its owner closes; None for a log of this call.
        **options: See :func:`~agentsgym.rollouts.driver.drive`.

    Raises:
        TooManyFailuresError: More rollouts failed than the policy allows; ``trajectories`` has the finished ones.
    """
    policy = policy or FailurePolicy()
    count = FailureCount(policy, len(trials) + len(finished_before))
    for one in finished_before:
        count.add(one)

    def finished(trajectory: Trajectory) -> None:
        if on_finish is not None:
            on_finish(trajectory)
        count.add(trajectory)

    with FailureLog(logger) if log is None else nullcontext(log) as used:
        rounds = TrialRounds(trials, policy, used, finished)
        rounds.play(agent, **options)
        while rounds.pending:
            rounds.play(agent, **options)
        return rounds.trajectories


Observation = list[Message]


class EpisodeByHand:
    """An episode whose actions are passed one by one, played like any other trial.

    Attributes:
        trajectory: The finished trajectory; None while the episode is running.
    """

    def __init__(self, trial: Trial) -> None:
        """Start the first episode of a trial.

        Raises:
            EnvError: The environment failed.
            ConfigError: The environment cannot play this task now, or the first prompt uses up the token budget.
        """
        trial.episodes = range(1)
        prepare_play([trial])
        self._trial = trial
        self._generator: Generator[TurnRequest, Action, Trajectory] = trial.play()
        self.trajectory: Trajectory | None = None
        self._advance(None)
        if self.trajectory is not None:
            raise ConfigError("the first prompt uses up all tokens of env_config['max_trajectory_tokens']: raise it")

    def observation(self) -> Observation:
        """Return the messages since the last action."""
        conversation = self._trial.conversation
        start = conversation.turns[-1].message_index + 1 if conversation.turns else 0
        return [message.copy() for message in conversation.transcript.messages[start:]]

    def step(self, action: str | Action) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play one action: see :meth:`~agentsgym.envs.base.MultistepEnv.step`."""
        if self.trajectory is not None:
            raise ConfigError(f"the episode is over ({self.trajectory.stop_reason}): call reset(task_data) first")
        if not isinstance(action, str | Action):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"step requires the agent's text or an Action, got {shown(action)}")
        self._advance(Action(text=action) if isinstance(action, str) else action)
        over = self.trajectory
        info = dict(self._trial.conversation.info)
        if over is not None:
            info["stop_reason"] = over.stop_reason
        return self.observation(), self._trial.conversation.turns[-1].reward, over is not None, info

    def close(self) -> None:
        """End the episode at any point."""
        self._generator.close()

    def _advance(self, action: Action | None) -> None:
        generator: Any = self._generator
        try:
            generator.send(action)
        except StopIteration as over:
            self.trajectory = over.value
            if over.value.stop_reason is StopReason.FAILED:
                raise EnvError(over.value.error) from None
