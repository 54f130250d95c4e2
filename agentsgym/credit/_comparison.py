"""Subtract baselines, divide by a standard deviation, and assign the results to turns, for all estimators."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Literal, get_args

from agentsgym.credit.rewards import indices_by_key
from agentsgym.credit.scored import ScoredRollout
from agentsgym.fields import check_choice

Scale = Literal["none", "group", "batch"]

_EPSILON = 1e-4  # TRL's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number, to be compared with others.

    Attributes:
        value: A final reward, a return or a turn's reward.
        rollout_index: Index of its rollout.
        turns: The turns of the rollout that get the resulting advantage.
        group: Key of the samples that it is compared with.
    """

    value: float
    rollout_index: int
    turns: Sequence[int]
    group: Hashable


BaselineFn = Callable[[Sequence[Sample]], list[float] | None]
"""The samples of one group → the baseline of each; None if there is nothing to compare them with."""


def final_rewards(rollouts: Sequence[ScoredRollout]) -> list[Sample]:
    """The final reward of each included rollout, for all of its turns; the groups are the task groups."""
    return [
        Sample(value=one.final_reward, rollout_index=i, turns=range(len(one.turn_rewards)), group=one.group)
        for i, one in enumerate(rollouts)
        if one.included
    ]


def turn_values(
    rollouts: Sequence[ScoredRollout],
    values_of: Callable[[ScoredRollout], Sequence[float]],
    group_of: Callable[[ScoredRollout, int], Hashable],
) -> list[Sample]:
    """Make a sample for each turn of the included rollouts.

    Args:
        rollouts: The batch.
        values_of: Function that returns the numbers of a rollout's first turns, at most K of them.
        group_of: Function that returns the group within which a turn is compared; None excludes the turn.
    """
    samples: list[Sample] = []
    for i, one in enumerate(rollouts):
        for k, value in enumerate(values_of(one) if one.included else ()):
            if (group := group_of(one, k)) is not None:
                samples.append(Sample(value=value, rollout_index=i, turns=(k,), group=group))
    return samples


def mean_of_all(samples: Sequence[Sample]) -> list[float]:
    """The mean over the group, the same for each of its samples."""
    mean = fmean(sample.value for sample in samples)
    return [mean] * len(samples)


def mean_of_others(samples: Sequence[Sample]) -> list[float] | None:
    """The mean over the samples of other rollouts, for each sample; None if all come from one rollout."""
    own: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        own[sample.rollout_index].append(sample.value)
    if len(own) == 1:
        return None
    total = math.fsum(chain.from_iterable(own.values()))
    means = {i: (total - math.fsum(values)) / (len(samples) - len(values)) for i, values in own.items()}
    return [means[sample.rollout_index] for sample in samples]


def center(
    rollouts: Sequence[ScoredRollout], samples: Sequence[Sample], baseline: BaselineFn, scale: Scale
) -> list[list[float]]:
    """Subtract from each sample a baseline computed from its own group, and scale the differences.

    Args:
        rollouts: The batch.
        samples: Its samples, (N,).
        baseline: Function that computes the baselines of one group.
        scale: The divisor of the differences.

    Returns:
        One number per turn of each rollout: the scaled difference of its sample, or 0.0 if it has no sample.

    Raises:
        ConfigError: ``scale`` is unknown.
    """
    check_choice("scale", scale, get_args(Scale))
    differences = [0.0] * len(samples)
    for indices in by_group(samples).values():
        own = [samples[index] for index in indices]
        values, baselines = [sample.value for sample in own], baseline(own)
        if baselines is None:  # the baseline is 0, but there is no spread to divide by
            numbers = [0.0] * len(values) if scale == "group" else values
        elif nearly_equal(values):
            continue
        else:
            divisor = scale_divisor(values, about=fmean(values)) if scale == "group" else 1.0
            numbers = [(value - one) / divisor for value, one in zip(values, baselines, strict=True)]
        for index, number in zip(indices, numbers, strict=True):
            differences[index] = number
    return _on_turns(rollouts, samples, differences, scale)


def center_on(
    rollouts: Sequence[ScoredRollout], samples: Sequence[Sample], baseline_of: Callable[[Hashable], float], scale: Scale
) -> list[list[float]]:
    """Subtract from each sample a baseline from outside the batch, and scale the differences.

    The standard deviation is about 0, in a group as in the batch: if all values are equal and far from the baseline,
    the deviation about their mean would be near 0, and the result enormous.

    ``baseline_of`` returns the baseline of a group; the rest is as in :func:`center`.
    """
    check_choice("scale", scale, get_args(Scale))
    differences = [sample.value - baseline_of(sample.group) for sample in samples]
    for indices in by_group(samples).values() if scale == "group" else ():
        divisor = scale_divisor([differences[index] for index in indices])
        for index in indices:
            differences[index] /= divisor
    return _on_turns(rollouts, samples, differences, scale)


def _on_turns(
    rollouts: Sequence[ScoredRollout], samples: Sequence[Sample], differences: Sequence[float], scale: Scale
) -> list[list[float]]:
    """Assign each sample's difference to its turns; ``"batch"`` divides by the batch's standard deviation."""
    divisor = scale_divisor(differences) if scale == "batch" else 1.0
    advantages = [[0.0] * len(one.turn_rewards) for one in rollouts]
    for sample, difference in zip(samples, differences, strict=True):
        for k in sample.turns:
            advantages[sample.rollout_index][k] = difference / divisor
    return advantages


def by_group(samples: Sequence[Sample]) -> dict[Hashable, list[int]]:
    """The indices of each group's samples, in the order of the groups' first samples."""
    return indices_by_key([sample.group for sample in samples])


def scale_divisor(values: Sequence[float], *, about: float = 0.0) -> float:
    """The standard deviation, n - 1 in the denominator, plus TRL's epsilon; about 0, even a single value deviates."""
    return math.sqrt(math.fsum((value - about) ** 2 for value in values) / max(len(values) - 1, 1)) + _EPSILON


def nearly_equal(values: Sequence[float]) -> bool:
    """Whether values differ by no more than a rounding error of single precision."""
    return math.isclose(min(values), max(values), rel_tol=1e-6, abs_tol=1e-6)
