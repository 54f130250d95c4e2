"""Measure how well a judge agrees with labels: accuracy and Cohen's kappa, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from agentsgym.seeding import derive_seed
from agentsgym.statistics.intervals import Estimate, bootstrap_intervals, exact_binomial_interval

_NUM_RESAMPLES = 2000  # of a kappa, which is computed anew for each

Kappa = Callable[[Sequence[float], Sequence[float]], float | None]


def cohen_kappa(labels: Sequence[float], given: Sequence[float]) -> float | None:
    """Compute the agreement beyond chance, ``κ = (p_o − p_e) / (1 − p_e)`` (Cohen 1960).

    ``p_o`` is the fraction of equal pairs, and ``p_e`` the fraction that would be equal if the two were independent
    with the same frequencies.

    Args:
        labels: The labels, (N,).
        given: What was given instead, (N,).

    Returns:
        1 for perfect agreement, 0 for that of chance; None if both are constant and equal, or there are none.

    >>> cohen_kappa([1, 1, 0, 0], [1, 0, 0, 0])
    0.5
    >>> cohen_kappa([1, 1], [1, 1]) is None
    True
    """
    if not len(labels):
        return None
    number = len(labels)
    own, others = Counter(labels), Counter(given)
    observed = sum(a == b for a, b in zip(labels, given, strict=True)) / number
    expected = sum(count * others[label] for label, count in own.items()) / number**2
    return None if expected >= 1 else (observed - expected) / (1 - expected)


def weighted_kappa(labels: Sequence[float], given: Sequence[float]) -> float | None:
    """Compute Cohen's kappa with squared differences as weights, for grades (Cohen 1968).

    ``κ = 1 − Σ_i (x_i − y_i)² / n ÷ Σ_ij (x_i − y_j)² / n²``, which needs no categories.

    Args:
        labels: The labels x, (N,).
        given: What was given instead, y, (N,).

    Returns:
        See :func:`cohen_kappa`.

    >>> weighted_kappa([1, 2, 3], [1, 2, 3]), weighted_kappa([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    if not len(labels):
        return None
    x, y = np.asarray(labels, dtype=np.float64), np.asarray(given, dtype=np.float64)
    expected = float(x.var() + y.var() + (x.mean() - y.mean()) ** 2)
    return None if expected <= 0 else float(1 - np.mean((x - y) ** 2) / expected)


def share_estimate(values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0) -> Estimate:
    """Estimate a share, with a 95% interval over clusters by :func:`bootstrap_intervals`.

    Args:
        values: Numbers in [0, 1], (N,), at least one.
        clusters: What may not be resampled apart, (N,).
        seed: Random seed of the bootstrap.
    """
    mean = float(np.mean(values))
    if mean in (0.0, 1.0):
        return exact_binomial_interval(mean, len(set(clusters)), 0.95)
    low, high = bootstrap_intervals([[value] for value in values], clusters, seed=seed)[:, 0]
    return Estimate(mean=mean, low=float(low), high=float(high))


def kappa_estimate(
    kappa: Kappa, labels: Sequence[float], given: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0
) -> Estimate | None:
    """Estimate a kappa, with a 95% percentile-bootstrap interval over clusters; None if it is undefined.

    Resamples in which it is undefined count as no agreement beyond chance.

    Args:
        kappa: The function that computes it.
        labels: The labels, (N,).
        given: What was given instead, (N,).
        clusters: What may not be resampled apart, (N,).
        seed: Random seed of the bootstrap.
    """
    mean = kappa(labels, given)
    if mean is None:
        return None
    pairs: dict[Hashable, list[tuple[float, float]]] = {}
    for cluster, label, other in zip(clusters, labels, given, strict=True):
        pairs.setdefault(cluster, []).append((label, other))
    members = [*pairs.values()]
    rng = np.random.default_rng(derive_seed("kappa", seed))
    found: list[float] = []
    for _ in range(_NUM_RESAMPLES):
        drawn: list[tuple[float, float]] = []
        for index in map(int, rng.integers(len(members), size=len(members))):
            drawn += members[index]
        found.append(kappa([pair[0] for pair in drawn], [pair[1] for pair in drawn]) or 0.0)
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(mean=mean, low=float(low), high=float(high))
