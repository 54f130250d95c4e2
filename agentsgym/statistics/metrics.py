"""Win rate, reward and turns with confidence intervals, pass@k, and the fraction of optimal play."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agentsgym._lazy import deferred
from agentsgym.envs.spec import Anchors
from agentsgym.statistics.breakdown import RolloutOutcome, by_label, by_role, components_by_name
from agentsgym.statistics.intervals import Estimate, bootstrap_intervals, cluster_totals, exact_binomial_interval
from agentsgym.statistics.optimality import anchors_of_info, fraction_with_interval
from agentsgym.statistics.passing import maj_at_k, pass_at_k, pass_at_k_interval, pass_hat_k, pass_hat_k_interval
from agentsgym.types import StopReason, Trajectory

if TYPE_CHECKING:
    from pandas import DataFrame

_html_of = deferred("agentsgym.reports.html", "evaluation_html")
_frame_of = deferred("agentsgym.reports.frames", "rollouts_frame")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Estimates from a set of rollouts; an estimate is None if no rollout has the value.

    Attributes:
        win_rate: Fraction of rollouts that were won, in [0, 1]; None if success is unknown for all. Otherwise,
            rollouts with unknown success count as not won.
        reward: Mean final reward; None if all rollouts failed.
        turns: Mean number of turns; None if all rollouts failed.
        num_episodes: Number of rollouts in the estimates, each one episode or trial, without failed ones.
        num_failed: Number of rollouts in which the environment or the agent failed.
        stop_reasons: Number of rollouts by stop reason, including failed ones.
        trajectories: All rollouts, as given.
        confidence: Confidence level of the intervals, in (0, 1).
        num_left_out: Number of rollouts that did not fail, but whose task groups were too small (``min_group_size``).
        by_environment: An evaluation for each environment if there are several; otherwise empty.
        by_role: An evaluation for each role (:func:`~agentsgym.statistics.breakdown.seat_outcomes`) if there are
            several; otherwise empty. It counts the turns of the role, and has no trajectories.
        fraction_of_optimal: The reward between random play (0) and optimal play (1), over the rollouts for which both
            are known and at most one role is rewarded; None without such rollouts, as in self-play, or if random play
            is optimal.
        clusters: Key of each trajectory; trajectories with equal keys count as one task in the intervals. Empty if not
            all trajectories are available.
        metrics: Mean of each metric in the environments' ``info`` (:attr:`~agentsgym.types.Trajectory.metrics`), over
            the rollouts that have it; empty for a role.
        components: Mean of each named reward, over all rollouts that did not fail, so that they add up to ``reward``:
            a rollout that lacks one counts as 0. Empty without named rewards.
    """

    win_rate: Estimate | None
    reward: Estimate | None
    turns: Estimate | None
    num_episodes: int
    num_failed: int
    stop_reasons: Mapping[StopReason, int]
    trajectories: Sequence[Trajectory]
    confidence: float = 0.95
    num_left_out: int = 0
    by_environment: Mapping[str, Evaluation] = field(default_factory=dict[str, "Evaluation"])
    by_role: Mapping[Hashable, Evaluation] = field(default_factory=dict[Hashable, "Evaluation"])
    fraction_of_optimal: Estimate | None = None
    clusters: Sequence[Hashable] = ()
    metrics: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    components: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])

    def __repr__(self) -> str:
        counts = {"failed": self.num_failed, "left out": self.num_left_out}
        parts = [f"{self.num_episodes} episodes", *(f"{n} {name}" for name, n in counts.items() if n)]
        parts += [
            f"{name} {estimate.mean:z.3g} [{estimate.low:z.3g}, {estimate.high:z.3g}]"
            for name, estimate in self._estimates()
            if estimate is not None
        ]
        return f"<Evaluation of {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        return _html_of(self)

    def to_pandas(self, by: Literal["rollout", "turn"] = "rollout") -> DataFrame:
        """Return a table with one row per rollout, including failed ones, or one row per turn.

        The columns are those of :func:`~agentsgym.reports.frames.rollout_row` and
        :func:`~agentsgym.reports.frames.turn_rows`.

        Raises:
            ConfigError: ``by`` is neither ``"rollout"`` nor ``"turn"``.
        """
        return _frame_of(self.trajectories, by)

    def pass_at_k(self, k: int) -> float:
        """Estimate the chance that at least one of k rollouts of a task is won: see :func:`pass_at_k`."""
        return pass_at_k(self.trajectories, k)

    def pass_at_k_interval(self, k: int) -> Estimate:
        """Estimate pass@k with an interval over tasks: see :func:`~agentsgym.statistics.passing.pass_at_k_interval`.

        The confidence level and the clusters (``cluster_by``) are those of the other estimates.
        """
        return pass_at_k_interval(self.trajectories, k, clusters=self.clusters or None, confidence=self.confidence)

    def pass_hat_k(self, k: int) -> float:
        """Estimate the chance that all of k rollouts of a task are won, pass^k: see :func:`pass_hat_k`."""
        return pass_hat_k(self.trajectories, k)

    def pass_hat_k_interval(self, k: int) -> Estimate:
        """Estimate pass^k with an interval over tasks, as :meth:`pass_at_k_interval` does for pass@k."""
        return pass_hat_k_interval(self.trajectories, k, clusters=self.clusters or None, confidence=self.confidence)

    def maj_at_k(self, k: int) -> float:
        """Estimate how often the most frequent answer is right: see :func:`~agentsgym.statistics.passing.maj_at_k`."""
        return maj_at_k(self.trajectories, k)

    def _estimates(self) -> list[tuple[str, Estimate | None]]:
        return [
            ("win_rate", self.win_rate),
            ("mean_turns", self.turns),
            ("mean_reward", self.reward),
            *((f"rewards/{name}", estimate) for name, estimate in self.components.items()),
            ("fraction_of_optimal", self.fraction_of_optimal),
            *((f"info/{name}", estimate) for name, estimate in self.metrics.items()),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values; estimates that were not computed are None.

        Metrics from ``info`` are named ``info/KEY``, and named rewards ``rewards/NAME``. ``by_environment`` and
        ``by_role`` are included if they are not empty; a role's key is its ``str``.
        """
        numbers: dict[str, Any] = {}
        for name, estimate in self._estimates():
            numbers[name] = None if estimate is None else estimate.mean
            numbers[f"{name}_interval"] = None if estimate is None else [estimate.low, estimate.high]
        parts = {"by_environment": self.by_environment, "by_role": self.by_role}
        for name, part in parts.items():
            if part:
                numbers[name] = {str(key): evaluation.as_dict() for key, evaluation in part.items()}
        return numbers | {
            "confidence": self.confidence,
            "num_episodes": self.num_episodes,
            "num_failed": self.num_failed,
            "num_left_out": self.num_left_out,
            "stop_reasons": {reason.value: count for reason, count in self.stop_reasons.items()},
        }


def summarize(
    trajectories: Sequence[Trajectory],
    *,
    clusters: Sequence[Hashable] | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    environments: Sequence[str] | None = None,
    anchors: Sequence[Anchors | None] | None = None,
) -> Evaluation:
    """Summarize rollouts as an :class:`Evaluation`.

    Intervals come from a bootstrap over tasks (:func:`bootstrap_intervals`), since repetitions of one task are not
    independent evidence about other tasks. If there is only one task, its rollouts are resampled, and the intervals
    are valid only for that task. If all rollouts were won or all were lost, resampling shows no spread, and the win
    rate's interval is the exact binomial interval for the n tasks instead (Clopper & Pearson 1934).

    Args:
        trajectories: The rollouts, including failed ones, which are counted but excluded from every estimate.
        clusters: One key per trajectory, by default its ``task_index``; trajectories with equal keys count as one
            task. By default every row of a task list is a separate task. If several rows differ only in their seed, for
            example rows with the same secret word, pass the secret words: the intervals then describe performance on
            new secret words.
        seed: Random seed for the bootstrap; the intervals are deterministic given the input and the seed.
        confidence: Confidence level of the intervals, in (0, 1).
        environments: Name of each trajectory's environment, for ``by_environment``; None if there is only one.
        anchors: Rewards of random and optimal play on each trajectory's task; by default those in its ``info``.

    Raises:
        ValueError: There are no trajectories, or ``clusters``, ``environments`` or ``anchors`` has another length.
    """
    known = [anchors_of_info(trajectory.info) for trajectory in trajectories] if anchors is None else anchors
    keys = [trajectory.task_index for trajectory in trajectories] if clusters is None else clusters
    options: dict[str, Any] = {"seed": seed, "confidence": confidence, "environments": environments}
    return summarize_outcomes(trajectories, trajectories, clusters=keys, anchors=known, **options)


def summarize_outcomes(  # noqa: PLR0913  # keyword arguments, most of them optional
    outcomes: Sequence[RolloutOutcome],
    trajectories: Sequence[Trajectory],
    *,
    clusters: Sequence[Hashable],
    seed: int = 0,
    confidence: float = 0.95,
    environments: Sequence[str] | None = None,
    anchors: Sequence[Anchors | None] | None = None,
) -> Evaluation:
    """Summarize rollouts as :func:`summarize` does, if only their outcomes are available.

    Args:
        outcomes: Outcomes of all rollouts, including failed ones.
        trajectories: The rollouts that are available as trajectories.
        clusters: One key per outcome, as in :func:`summarize`.
        seed: See :func:`summarize`.
        confidence: See :func:`summarize`.
        environments: One name per outcome, as in :func:`summarize`.
        anchors: One per outcome; None if all are unknown.
    """
    if not outcomes:
        raise ValueError("an evaluation requires at least one trajectory, got none")
    for name, labels in (("clusters", clusters), ("environments", environments), ("anchors", anchors)):
        if labels is not None and len(labels) != len(outcomes):
            raise ValueError(f"{name} must have one entry per trajectory, got {len(labels)} for {len(outcomes)}")
    summary = partial(_summary, seed=seed, confidence=confidence)
    whole = trajectories if trajectories is outcomes else None
    environment_rows = by_label(environments or ())
    role_rows = by_role(outcomes)
    return replace(
        summary(outcomes, clusters, trajectories, anchors or ()),
        by_environment={
            name: summary(
                [outcomes[i] for i in rows],
                [clusters[i] for i in rows],
                [whole[i] for i in rows] if whole is not None else (),
                [anchors[i] for i in rows] if anchors is not None else (),
            )
            for name, rows in (environment_rows.items() if len(environment_rows) > 1 else ())
        },
        by_role={
            role: summary([one for _, one in rows], [clusters[i] for i, _ in rows], (), ())
            for role, rows in (role_rows.items() if len(role_rows) > 1 else ())
        },
    )


def _summary(
    outcomes: Sequence[RolloutOutcome],
    clusters: Sequence[Hashable],
    trajectories: Sequence[Trajectory],
    anchors: Sequence[Anchors | None],
    *,
    seed: int,
    confidence: float,
) -> Evaluation:
    played = [outcome for outcome in outcomes if not outcome.failed]
    keys = [key for key, outcome in zip(clusters, outcomes, strict=True) if not outcome.failed]
    win_rate = reward = turns = None
    named = components_by_name(played)
    if played:
        values = [[bool(one.success), one.final_reward, one.num_turns] for one in played]
        win_rate, reward, turns = _means(values, keys, seed, confidence)
        if all(one.success is None for one in played):
            win_rate = None
        elif win_rate.mean in {0.0, 1.0}:
            num_tasks = len(set(keys))
            win_rate = exact_binomial_interval(win_rate.mean, num_tasks if num_tasks > 1 else len(played), confidence)
    return Evaluation(
        win_rate=win_rate,
        reward=reward,
        turns=turns,
        num_episodes=len(played),
        num_failed=len(outcomes) - len(played),
        stop_reasons=dict(sorted(Counter(outcome.stop_reason for outcome in outcomes).items())),
        trajectories=trajectories,
        confidence=confidence,
        clusters=list(clusters) if len(trajectories) == len(clusters) else (),
        fraction_of_optimal=_fraction(outcomes, clusters, anchors, seed, confidence),
        metrics=_info_estimates(played, keys, seed, confidence),
        components=dict(zip(named, _means([*zip(*named.values(), strict=True)], keys, seed, confidence), strict=True))
        if named
        else {},
    )


def fraction_of_optimal(value: float, *, random: float, optimal: float) -> float:
    """Place a value between random play (0) and optimal play (1): ``(value − random) / (optimal − random)``.

    >>> fraction_of_optimal(0.75, random=0.5, optimal=1.0)
    0.5
    """
    return (value - random) / (optimal - random)


def _info_estimates(
    played: Sequence[RolloutOutcome], keys: Sequence[Hashable], seed: int, confidence: float
) -> dict[str, Estimate]:
    """Estimate each metric of ``info`` from the rollouts that have it, resampling together if these are the same."""
    metrics = [one.metrics for one in played]
    rows_of = {
        name: tuple(i for i, rollout_metrics in enumerate(metrics) if name in rollout_metrics)
        for name in dict.fromkeys(name for rollout_metrics in metrics for name in rollout_metrics)
    }
    found: dict[str, Estimate] = {}
    for rows in dict.fromkeys(rows_of.values()):
        names = [name for name, metric_rows in rows_of.items() if metric_rows == rows]
        values = [[metrics[i][name] for name in names] for i in rows]
        found |= zip(names, _means(values, [keys[i] for i in rows], seed, confidence), strict=True)
    return {name: found[name] for name in rows_of}


def _means(values: Sequence[Sequence[float]], keys: Sequence[Hashable], seed: int, confidence: float) -> list[Estimate]:
    """Estimate the mean of each column of values, (N, M), where rows with equal keys form a cluster."""
    columns = np.array(values, dtype=np.float64)
    clusters = keys if len(set(keys)) > 1 else range(len(columns))
    low, high = bootstrap_intervals(columns, clusters, confidence=confidence, seed=seed)
    # The interval must contain the mean, although quantiles of equal values can be off by a rounding error.
    # Adding 0.0 turns -0.0 into 0.0.
    return [
        Estimate(mean=float(m) + 0.0, low=float(min(a, m)) + 0.0, high=float(max(b, m)) + 0.0)
        for m, a, b in zip(columns.mean(axis=0), low, high, strict=True)
    ]


def _fraction(
    outcomes: Sequence[RolloutOutcome],
    clusters: Sequence[Hashable],
    anchors: Sequence[Anchors | None],
    seed: int,
    confidence: float,
) -> Estimate | None:
    """Estimate the fraction of optimal play from rollouts with known anchors and at most one rewarded role."""
    placed = [
        (key, (outcome.final_reward, known.random, known.optimal))
        for outcome, key, known in zip(outcomes, clusters, anchors, strict=False)
        if known is not None and not outcome.failed and len(outcome.final_rewards) <= 1
    ]
    if not placed:
        return None
    keys, values = [key for key, _ in placed], np.array([row for _, row in placed], dtype=np.float64)  # (N, 3)
    sums, _ = cluster_totals(values, keys if len(set(keys)) > 1 else range(len(keys)))
    return fraction_with_interval(sums, confidence=confidence, seed=seed)
