"""Estimates and their confidence intervals: a bootstrap over clusters, or exact."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


NUM_RESAMPLES = 10_000
_ENTRIES_PER_BLOCK = 1_000_000  # drawn indices in memory: a few tens of MB, however many tasks there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over rollouts, and its confidence interval for tasks of the same kind.

    Attributes:
        mean: The mean over the rollouts.
        low: Lower end of the interval.
        high: Upper end.
    """

    mean: float
    low: float
    high: float


def bootstrap_intervals(
    values: ArrayLike,
    clusters: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Compute a confidence interval for each column's mean by a percentile bootstrap over clusters.

    Each resample draws C of the C clusters with replacement, each with all of its rows:
    ``mean* = Σ_c sum_c / Σ_c count_c`` over the drawn c; the bounds are the ``(1 ± confidence) / 2`` quantiles of
    ``mean*`` (Efron & Tibshirani 1993, chapters 8 and 13). All columns use the same draws.

    Args:
        values: (N, M), one row per rollout and one column per quantity.
        clusters: Cluster key of each row, (N,).
        confidence: Confidence level, in (0, 1).
        num_resamples: Number of resamples.
        seed: Random seed of the resamples.

    Returns:
        (2, M), the lower and the upper bounds.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    sums, counts = cluster_totals(np.asarray(values, dtype=np.float64), clusters)  # (C, M), (C, 1)
    num_clusters = len(sums)
    totals = np.ascontiguousarray(np.hstack([sums, counts]).T)  # (M + 1, C)
    means: list[NDArray[np.float64]] = []
    for drawn in draws(num_clusters, num_resamples, derive_seed("bootstrap", seed)):
        # Counting how often each cluster was drawn is three times as fast as adding up the drawn clusters.
        slots = (drawn + num_clusters * np.arange(len(drawn))[:, None]).ravel()
        times = np.bincount(slots, minlength=drawn.size).reshape(drawn.shape)  # (R, C)
        resampled = np.einsum("rc,mc->rm", times.astype(np.float64), totals)  # (R, M + 1)
        means.append(resampled[:, :-1] / resampled[:, -1:])  # (R, M)
    return np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)


def draws(num_clusters: int, num_resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Draw C of the C clusters with replacement for each resample: indices, (R, C), in blocks that bound the memory."""
    generator = np.random.default_rng(seed)
    block = max(1, _ENTRIES_PER_BLOCK // num_clusters)
    for start in range(0, num_resamples, block):
        yield generator.integers(num_clusters, size=(min(block, num_resamples - start), num_clusters))


def exact_binomial_interval(mean: float, num_tasks: int, confidence: float) -> Estimate:
    """Compute the interval of a rate that is 0 or 1 in every task, so that resampling shows no spread.

    The exact binomial interval for n tasks (Clopper & Pearson 1934).

    Args:
        mean: 0.0 or 1.0.
        num_tasks: n, the number of independent tasks.
        confidence: 1 − α, in (0, 1).
    """
    reach = ((1 - confidence) / 2) ** (1 / num_tasks)
    return Estimate(mean=mean, low=reach if mean else 0.0, high=1.0 if mean else 1 - reach)


def cluster_totals(
    values: NDArray[np.float64], clusters: Sequence[Hashable]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Add up the rows of each cluster: sums (C, M) and numbers of rows (C, 1).

    Args:
        values: (N, M).
        clusters: Cluster key of each row, (N,).
    """
    codes: dict[Hashable, int] = {}
    rows = np.array([codes.setdefault(key, len(codes)) for key in clusters])  # (N,)
    sums = np.zeros((len(codes), values.shape[1]))
    np.add.at(sums, rows, values)
    return sums, np.bincount(rows).astype(np.float64)[:, None]


def share_estimate(
    values: Sequence[float], clusters: Sequence[Hashable], *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Estimate a share, with an interval over clusters by :func:`bootstrap_intervals`, or exact if it is 0 or 1.

    Args:
        values: Numbers in [0, 1], (N,), at least one.
        clusters: What may not be resampled apart, (N,).
        confidence: Confidence level of the interval, in (0, 1).
        seed: Random seed of the bootstrap.
    """
    mean = sum(values) / len(values)
    low, high = bootstrap_intervals([[value] for value in values], clusters, confidence=confidence, seed=seed)[:, 0]
    if mean in {0.0, 1.0}:
        return exact_binomial_interval(mean, len(set(clusters)), confidence)
    return Estimate(mean=mean, low=min(mean, float(low)), high=max(mean, float(high)))
