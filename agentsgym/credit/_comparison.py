"""What the estimators share: numbers compared within groups, minus a baseline, over a spread."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

from agentsgym.errors import ConfigError, did_you_mean

Scale = Literal["none", "group", "batch"]

_EPSILON = 1e-4  # TRL's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number that is compared with others.

    Attributes:
        value: A final reward or a return.
        rollout: Index of the rollout it comes from.
        group: It is compared with the samples of the same group.
    """

    value: float
    rollout: int
    group: Hashable


Mean = Callable[[Sequence[Sample]], list[float] | None]
"""The samples of one group → the baseline of each; None where there is nothing to compare with."""


def mean_of_all(samples: Sequence[Sample]) -> list[float]:
    """The mean over the group, the same for each of its samples."""
    mean = fmean(sample.value for sample in samples)
    return [mean] * len(samples)


def mean_of_others(samples: Sequence[Sample]) -> list[float] | None:
    """The mean over the samples of other rollouts, for each sample; None if all come from one rollout."""
    own: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        own[sample.rollout].append(sample.value)
    if len(own) == 1:
        return None
    total = math.fsum(sample.value for sample in samples)
    means = {i: (total - math.fsum(values)) / (len(samples) - len(values)) for i, values in own.items()}
    return [means[sample.rollout] for sample in samples]


def compare(samples: Sequence[Sample], mean: Mean, scale: Scale) -> list[float]:
    """Subtract from each sample the baseline of its group, and scale the differences.

    Args:
        samples: All of a batch, (N,).
        mean: Gives the baselines of one group.
        scale: What the differences are divided by.

    Returns:
        One number a sample, (N,).

    Raises:
        ConfigError: ``scale`` is unknown.
    """
    if scale not in get_args(Scale):
        raise ConfigError(f"scale_rewards is unknown: {scale!r}{did_you_mean(str(scale), get_args(Scale))}")
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[sample.group].append(index)
    differences = [0.0] * len(samples)
    for indices in groups.values():
        numbers = _compare_group([samples[index] for index in indices], mean, by_spread=scale == "group")
        for index, number in zip(indices, numbers, strict=True):
            differences[index] = number
    return _divided(differences, _spread(differences, about=0.0)) if scale == "batch" else differences


def nearly_equal(values: Sequence[float]) -> bool:
    """Whether values differ by no more than single precision leaves over."""
    return math.isclose(min(values), max(values), rel_tol=1e-6, abs_tol=1e-6)


def _compare_group(samples: Sequence[Sample], mean: Mean, *, by_spread: bool) -> list[float]:
    values = [sample.value for sample in samples]
    baselines = mean(samples)
    if baselines is None:  # the baseline is 0, but there is no spread to divide by
        return [0.0] * len(values) if by_spread else values
    if nearly_equal(values):
        return [0.0] * len(values)
    differences = [value - baseline for value, baseline in zip(values, baselines, strict=True)]
    return _divided(differences, _spread(values, about=fmean(values))) if by_spread else differences


def _spread(values: Sequence[float], *, about: float) -> float:
    """The standard deviation with n - 1 in the denominator; about 0, one value has a spread too."""
    return math.sqrt(math.fsum((value - about) ** 2 for value in values) / max(len(values) - 1, 1))


def _divided(values: Sequence[float], spread: float) -> list[float]:
    return [value / (spread + _EPSILON) for value in values]
