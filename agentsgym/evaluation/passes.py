"""How often k rollouts of a task hold a win (pass@k), and how often all of them are wins (pass^k), with intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from agentsgym.evaluation.metrics import Estimate, bootstrap_intervals
from agentsgym.seeding import derive_seed
from agentsgym.types import Trajectory

#: The chance of a task with n rollouts, c of them won, over all choices of k rollouts.
_Chance = Callable[[int, int, int], float]
_NUM_RESAMPLES = 10_000


def pass_hat_k(trajectories: Sequence[Trajectory], k: int) -> float:
    """Estimate the chance that all of k rollouts of a task are won, averaged over tasks: pass^k.

    ``C(c, k) / C(n, k)`` for a task with n rollouts, c of them won: unbiased (2406.12045, section 3). Where pass@k asks
    what a player can do, this asks what can be relied on. Failed rollouts are left out.

    Raises:
        ValueError: k is below 1, or some task has fewer than k rollouts that did not fail.
    """
    counts = _counts(trajectories, k, "pass^k")
    return sum(_all_won(n, c, k) for n, c in counts.values()) / len(counts)


def pass_at_k_estimate(
    trajectories: Sequence[Trajectory],
    k: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Estimate pass@k (:func:`~agentsgym.evaluation.metrics.pass_at_k`) with an interval over tasks.

    Each task's own value is unbiased, and the interval comes from a bootstrap over the tasks' values. If all of them
    are 0, or all are 1, it is the exact binomial one over the tasks (Clopper & Pearson 1934), as for the win rate. A
    single task's interval speaks of that task: its rollouts are drawn with replacement. Several tasks of one cluster
    alone say nothing of others: [0, 1].

    Args:
        trajectories: All rollouts; failed ones are left out.
        k: How many rollouts of a task are looked at.
        clusters: Which tasks belong together, one key a trajectory; by default each ``task_index`` by itself.
        confidence: Of the interval, in (0, 1).
        seed: Of the bootstrap.

    Raises:
        ValueError: k is below 1, some task has fewer than k rollouts that did not fail, or ``clusters`` has another
            length.
    """
    return _estimate(trajectories, k, "pass@k", clusters, confidence, seed)


def pass_hat_k_estimate(
    trajectories: Sequence[Trajectory],
    k: int,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Estimate pass^k (:func:`pass_hat_k`) with an interval over tasks; arguments as :func:`pass_at_k_estimate`."""
    return _estimate(trajectories, k, "pass^k", clusters, confidence, seed)


def most_rollouts(trajectories: Sequence[Trajectory]) -> int:
    """The largest k that every task has rollouts for; 0 if there is none."""
    return min((n for n, _ in _won_of(trajectories).values()), default=0)


def _estimate(  # one private function behind two public ones
    trajectories: Sequence[Trajectory],
    k: int,
    name: str,
    clusters: Sequence[Hashable] | None,
    confidence: float,
    seed: int,
) -> Estimate:
    chance = _CHANCES[name]
    counts = _counts(trajectories, k, name)
    values = np.array([chance(n, c, k) for n, c in counts.values()], dtype=np.float64)  # (N,), one a task
    mean = float(values.mean())
    keys = _keys(trajectories, clusters, counts)
    num_clusters = len(set(keys))
    if len(values) == 1:
        low, high = _of_one_task(chance, next(iter(counts.values())), k, confidence, seed)
    elif mean in {0.0, 1.0} or num_clusters == 1:
        reach = ((1 - confidence) / 2) ** (1 / num_clusters)
        low, high = (reach if mean == 1.0 else 0.0), (1 - reach if mean == 0.0 else 1.0)
    else:
        low, high = bootstrap_intervals(values[:, None], keys, confidence=confidence, seed=seed)[:, 0].tolist()
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean))


def _of_one_task(chance: _Chance, count: tuple[int, int], k: int, confidence: float, seed: int) -> tuple[float, float]:
    """Bound the value of one task by drawing its n rollouts with replacement."""
    n, c = count
    generator = np.random.default_rng(derive_seed("bootstrap of one task", seed))
    table = np.array([chance(n, won, k) for won in range(n + 1)])
    drawn = table[generator.binomial(n, c / n, size=_NUM_RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _keys(
    trajectories: Sequence[Trajectory], clusters: Sequence[Hashable] | None, counts: dict[int, tuple[int, int]]
) -> list[Hashable]:
    """The cluster of each task, in the order of ``counts``."""
    if clusters is None:
        return list(counts)
    if len(clusters) != len(trajectories):
        raise ValueError(f"clusters needs one entry a trajectory, got {len(clusters)} for {len(trajectories)}")
    key_of = {one.task_index: key for one, key in zip(trajectories, clusters, strict=True)}
    return [key_of[task] for task in counts]


def _counts(trajectories: Sequence[Trajectory], k: int, name: str) -> dict[int, tuple[int, int]]:
    counts = _won_of(trajectories)
    fewest = min((n for n, _ in counts.values()), default=0)
    if not 1 <= k <= fewest:
        raise ValueError(f"{name} needs 1 <= k <= the fewest rollouts of a task, got k = {k} and {fewest} rollouts")
    return counts


def _won_of(trajectories: Sequence[Trajectory]) -> dict[int, tuple[int, int]]:
    """How many rollouts of each task did not fail, and how many of these were won."""
    outcomes: defaultdict[int, list[bool]] = defaultdict(list)
    for one in trajectories:
        outcomes[one.task_index] += [] if one.failed else [bool(one.success)]
    return {task: (len(won), sum(won)) for task, won in outcomes.items()}


def _any_won(n: int, c: int, k: int) -> float:
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def _all_won(n: int, c: int, k: int) -> float:
    return math.comb(c, k) / math.comb(n, k)


_CHANCES: dict[str, _Chance] = {"pass@k": _any_won, "pass^k": _all_won}
