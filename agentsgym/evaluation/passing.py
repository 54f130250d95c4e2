"""How often one of k tries wins (pass@k), how often all of them do (pass^k), and their intervals over tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from agentsgym.evaluation.intervals import Estimate, bootstrap_intervals, without_spread
from agentsgym.seeding import derive_seed
from agentsgym.types import Trajectory

_NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class _Measure:
    """What is asked of k tries.

    Attributes:
        name: What errors call it.
        chance: That a choice of k rollouts holds what is asked, from how many were played, won and chosen.
        of_rate: The same for k tries that are each won with a given probability.
    """

    name: str
    chance: Callable[[int, int, int], float]
    of_rate: Callable[[float, int], float]


def _any_won(played: int, won: int, k: int) -> float:
    return 1 - math.comb(played - won, k) / math.comb(played, k)


def _all_won(played: int, won: int, k: int) -> float:
    return math.comb(won, k) / math.comb(played, k)


_ANY = _Measure("pass@k", _any_won, lambda rate, k: 1 - (1 - rate) ** k)
_ALL = _Measure("pass^k", _all_won, lambda rate, k: rate**k)


def pass_at_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the chance that at least one of k rollouts of a task is won, averaged over tasks.

    ``1 − C(n − c, k) / C(n, k)`` for a task with n rollouts, c of them won: unbiased (2107.03374, eq. 1). Failed
    rollouts are left out.

    Raises:
        ValueError: k is below 1, or some task has fewer than k rollouts that did not fail.
    """
    return _mean(_ANY, trajectories, k)


def pass_hat_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the chance that all of k rollouts of a task are won, averaged over tasks: pass^k.

    ``C(c, k) / C(n, k)`` for a task with n rollouts, c of them won: unbiased (2406.12045, section 3). Where pass@k asks
    what a player can do, this asks what can be relied on. Failed rollouts are left out.

    Raises:
        ValueError: As :func:`pass_at_k`.
    """
    return _mean(_ALL, trajectories, k)


def pass_at_k_interval(
    trajectories: Sequence[Trajectory],
    k: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Estimate pass@k as :func:`pass_at_k` does, and bound it for other such tasks.

    The interval is a percentile bootstrap over tasks, as those of win rate and reward are. Where the estimate is 0 or 1
    it is the exact binomial one over the tasks. Of a single task there is no spread to see: then the rollouts
    are drawn with replacement, and the interval speaks of that task only.

    Args:
        trajectories: The rollouts; failed ones are left out.
        k: The tries.
        clusters: What belongs together, one key a trajectory, as in :func:`~agentsgym.evaluation.metrics.summarize`; a
            task belongs where its first rollout does. None: each task by itself.
        confidence: Of the interval, in (0, 1).
        seed: Of the bootstrap.

    Raises:
        ValueError: As :func:`pass_at_k`; or ``clusters`` has another length, or ``confidence`` is not in (0, 1).
    """
    return _bounded(_ANY, _Rollouts(trajectories, clusters), k, confidence, seed)


def pass_hat_k_interval(
    trajectories: Sequence[Trajectory],
    k: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Estimate pass^k as :func:`pass_hat_k` does, and bound it for other such tasks, as :func:`pass_at_k_interval`."""
    return _bounded(_ALL, _Rollouts(trajectories, clusters), k, confidence, seed)


def most_rollouts(trajectories: Sequence[Trajectory]) -> int:
    """The largest k that every task has rollouts for, failed ones left out; 0 if there is none."""
    return min((played for played, _ in _counts(trajectories).values()), default=0)


class _Rollouts:
    """Rollouts and, by task, what each belongs to."""

    def __init__(self, trajectories: Sequence[Trajectory], clusters: Sequence[Hashable] | None) -> None:
        if clusters is not None and len(clusters) != len(trajectories):
            raise ValueError(f"clusters needs one entry a trajectory, got {len(clusters)} for {len(trajectories)}")
        self.trajectories = trajectories
        self.key_of = dict[int, Hashable]()
        for trajectory, key in zip(trajectories, clusters or [one.task_index for one in trajectories], strict=True):
            self.key_of.setdefault(trajectory.task_index, key)


def _mean(measure: _Measure, trajectories: Sequence[Trajectory], k: int) -> float:
    chances = [measure.chance(n, won, k) for n, won in _counts_for(measure, trajectories, k).values()]
    return sum(chances) / len(chances)


def _bounded(measure: _Measure, rollouts: _Rollouts, k: int, confidence: float, seed: int) -> Estimate:
    counts = _counts_for(measure, rollouts.trajectories, k)
    if len(counts) == 1:
        (only,) = counts.values()
        return _of_one_task(measure, only, k, confidence, seed)
    chances = [measure.chance(n, won, k) for n, won in counts.values()]
    keys = [rollouts.key_of[task] for task in counts]
    keys = keys if len(set(keys)) > 1 else list(counts)
    low, high = bootstrap_intervals(np.array(chances)[:, None], keys, confidence=confidence, seed=seed)[:, 0]
    mean = sum(chances) / len(chances)
    if mean in {0.0, 1.0}:
        return without_spread(mean, len(set(keys)), confidence)
    return Estimate(mean=mean, low=min(mean, float(low)), high=max(mean, float(high)))


def _counts_for(measure: _Measure, trajectories: Sequence[Trajectory], k: int) -> dict[int, tuple[int, int]]:
    counts = _counts(trajectories)
    fewest = min((played for played, _ in counts.values()), default=0)
    if not 1 <= k <= fewest:
        raise ValueError(
            f"{measure.name} needs 1 <= k <= the fewest rollouts of a task, got k = {k} and {fewest} rollouts"
        )
    return counts


def _counts(trajectories: Sequence[Trajectory]) -> dict[int, tuple[int, int]]:
    """How many rollouts of each task did not fail, and how many of them were won."""
    counts: dict[int, tuple[int, int]] = {}
    for one in trajectories:
        played, won = counts.get(one.task_index, (0, 0))
        counts[one.task_index] = played + (not one.failed), won + (bool(one.success) and not one.failed)
    return counts


def _of_one_task(measure: _Measure, count: tuple[int, int], k: int, confidence: float, seed: int) -> Estimate:
    """Bound it by the task's own rollouts; where all went alike, by the exact interval of the chance to win one."""
    played, won = count
    mean = measure.chance(played, won, k)
    if won in {0, played}:
        one = without_spread(float(won > 0), played, confidence)
        return Estimate(mean=mean, low=measure.of_rate(one.low, k), high=measure.of_rate(one.high, k))
    generator = np.random.default_rng(derive_seed("bootstrap of one task", seed))
    drawn = generator.binomial(played, won / played, size=_NUM_RESAMPLES)
    chance_of = np.array([measure.chance(played, count, k) for count in range(played + 1)])
    low, high = np.quantile(chance_of[drawn], [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean=mean, low=min(mean, float(low)), high=max(mean, float(high)))
