"""Play trials to their ends, and retry failed ones as a policy allows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from agentsgym.agents.base import Agent
from agentsgym.envs.contract import PlayableEnv
from agentsgym.envs.trial import Trial, token_rewards
from agentsgym.errors import JudgeError
from agentsgym.failure_policy import FailureCount, FailurePolicy
from agentsgym.failures import FailureLog
from agentsgym.judging.rollouts import JudgingInOrder
from agentsgym.rollouts.driver import drive
from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

OnFinish = Callable[[Trajectory], None]


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
        self.pending = list(trials)
        self.num_played = 0
        self._policy = policy
        self._log = log
        self._on_finish = on_finish
        self._places = list(range(len(trials)))  # indices of the pending trials in the results
        self._results: dict[int, Trajectory] = {}
        self._judging: JudgingInOrder | None = None  # None until an environment has judges
        self._envs: dict[str, PlayableEnv] = {}  # by session, if there are judges

    @property
    def trajectories(self) -> list[Trajectory]:
        """The last attempt of each trial, in the order of the trials, judged if its environment has judges."""
        return [self._judged(self._results[place]) for place in sorted(self._results)]

    def play(self, agent: Agent, **options: Any) -> None:
        """Play one round; this calls the agent's ``finish``, even if no trial is pending.

        Args:
            agent: The agent that acts.
            **options: See :func:`~agentsgym.rollouts.driver.drive`.
        """
        trials, places = self.pending, self._places
        for trial in trials:
            trial.failures = self._log
        try:
            prepare_play(trials, max_concurrent=options.get("max_concurrent"), pool=options.get("pool"))
            if not self.num_played:
                self._announce(trials, agent)
        except BaseException:
            drive([], agent)  # the agents of other ranks may run in lockstep and wait for this one
            raise
        try:
            trajectories = drive(trials, agent, on_finish=self._note, **options)
            if self._judging is not None:
                self._judging.wait(options.get("interrupt"))
        except BaseException:
            self._close()
            raise
        self._results.update(zip(places, trajectories, strict=True))
        failed = [place for place, one in enumerate(trajectories) if self._is_retried(self._judged(one))]
        self.num_played += 1
        if not failed:
            self._close()
        self._places = [places[place] for place in failed]
        self.pending = [retry_of(trials[place], self._policy) for place in failed]

    def give_up(self) -> None:
        """Drop the pending trials."""
        self.pending, self._places = [], []

    def _announce(self, trials: Sequence[Trial], agent: Agent) -> None:
        """Set up the judges of the environments, if there are any."""
        if all(getattr(trial.env, "judges", ()) == () for trial in trials):
            return
        judging = JudgingInOrder(token_rewards, self._report)
        if judging.judging.expect(trials, agent):
            self._judging = judging
            self._envs = {trial.session_id: trial.env for trial in trials}

    def _judged(self, trajectory: Trajectory) -> Trajectory:
        known = {} if self._judging is None else self._judging.trajectories
        return known.get(trajectory.session_id, trajectory)

    def _is_retried(self, trajectory: Trajectory) -> bool:
        if self._judging is not None:
            return trajectory.session_id in self._judging.to_retry
        return trajectory.failed and self.num_played < self._policy.max_retries

    def _note(self, trajectory: Trajectory) -> None:
        if self._judging is None:
            self._report(trajectory, self._is_retried(trajectory))
            return
        env, may_retry = self._envs[trajectory.session_id], self.num_played < self._policy.max_retries
        self._judging.add(env, trajectory, may_retry=may_retry)

    def _report(self, trajectory: Trajectory, is_retried: bool) -> None:
        self._log.note(trajectory)
        if self._on_finish is not None and not is_retried:
            self._on_finish(trajectory)

    def _close(self) -> None:
        if self._judging is not None:
            self._judging.judging.close()


def judged(trial: Trial, trajectory: Trajectory) -> Trajectory:
    """Return the rollout of one trial with its judgments; unchanged if the environment has no judges.

    Raises:
        JudgeError: A judge failed.
        ConfigError: The environment has a judge of scope ``"group"``, or its judges are invalid.
    """
    judging = JudgingInOrder(token_rewards)
    if not judging.judging.expect([trial]):
        return trajectory
    try:
        judging.add(trial.env, trajectory)
        judging.wait()
    finally:
        judging.judging.close()
    found = judging.trajectories[trajectory.session_id]
    if found.error is not None:
        raise JudgeError(found.error.partition("\n")[2].removeprefix("JudgeError: "))
    return found


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
