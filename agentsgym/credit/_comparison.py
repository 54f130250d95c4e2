"""Subtract baselines from numbers, divide by a spread, and scatter them to turns: what the estimators share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError, did_you_mean

Scale = Literal["none", "group", "batch"]

_EPSILON = 1e-4  # TRL's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number that is compared with others.

    Attributes:
        value: A final reward, a return or a turn's reward.
        rollout_index: Index of the rollout it comes from.
        turns: The turns of that rollout whose advantage it becomes.
        group: It is compared with the samples of the same group.
    """

    value: float
    rollout_index: int
    turns: Sequence[int]
    group: Hashable


BaselineFn = Callable[[Sequence[Sample]], list[float] | None]
"""The samples of one group → the baseline of each; None where there is no other to compare with."""


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
    """A number for each turn of the included rollouts.

    Args:
        rollouts: The batch.
        values_of: Gives a rollout's numbers for its first turns, at most K.
        group_of: Gives each turn the group that it is compared within; a turn of the group None is left out.
    """
    return [
        Sample(value=value, rollout_index=i, turns=(k,), group=group)
        for i, one in enumerate(rollouts)
        if one.included
        for k, value in enumerate(values_of(one))
        if (group := group_of(one, k)) is not None
    ]


def scatter_to_turns(
    rollouts: Sequence[ScoredRollout], samples: Sequence[Sample], numbers: Sequence[float]
) -> list[list[float]]:
    """Put the number of each sample on its turns; the other turns get 0.0."""
    advantages = [[0.0] * len(one.turn_rewards) for one in rollouts]
    for sample, number in zip(samples, numbers, strict=True):
        for k in sample.turns:
            advantages[sample.rollout_index][k] = number
    return advantages


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
    total = math.fsum(sample.value for sample in samples)
    means = {i: (total - math.fsum(values)) / (len(samples) - len(values)) for i, values in own.items()}
    return [means[sample.rollout_index] for sample in samples]


def center(samples: Sequence[Sample], baseline: BaselineFn, scale: Scale) -> list[float]:
    """Subtract from each sample a baseline that its own group gives, and scale the differences.

    Args:
        samples: All of a batch, (N,).
        baseline: Gives the baselines of one group.
        scale: What the differences are divided by.

    Returns:
        One number a sample, (N,).

    Raises:
        ConfigError: ``scale`` is unknown.
    """
    check_choice("scale_rewards", scale, get_args(Scale))
    differences = [0.0] * len(samples)
    for indices in _groups(samples).values():
        own = [samples[index] for index in indices]
        values, baselines = [sample.value for sample in own], baseline(own)
        if baselines is None:  # the baseline is 0, but there is no spread to divide by
            numbers = [0.0] * len(values) if scale == "group" else values
        elif nearly_equal(values):
            continue
        else:
            numbers = [value - one for value, one in zip(values, baselines, strict=True)]
            if scale == "group":
                numbers = _divided(numbers, scale_divisor(values, about=fmean(values)))
        for index, number in zip(indices, numbers, strict=True):
            differences[index] = number
    return _divided(differences, scale_divisor(differences)) if scale == "batch" else differences


def center_on(samples: Sequence[Sample], baseline_of: Callable[[Hashable], float], scale: Scale) -> list[float]:
    """Subtract from each sample a baseline that comes from elsewhere, and scale the differences.

    Their spread is taken about 0 in a group as in the batch: the spread of the values about their own mean would be
    next to nothing, and the result enormous, where all values are equal and far from the baseline.

    Args:
        samples: All of a batch, (N,).
        baseline_of: Gives the baseline of a group.
        scale: What the differences are divided by.

    Returns:
        One number a sample, (N,).

    Raises:
        ConfigError: ``scale`` is unknown.
    """
    check_choice("scale_rewards", scale, get_args(Scale))
    differences = [sample.value - baseline_of(sample.group) for sample in samples]
    if scale == "none":
        return differences
    for indices in [range(len(samples))] if scale == "batch" else _groups(samples).values():
        own = [differences[index] for index in indices]
        for index, number in zip(indices, _divided(own, scale_divisor(own)), strict=True):
            differences[index] = number
    return differences


def scale_divisor(values: Sequence[float], *, about: float = 0.0) -> float:
    """The standard deviation, n - 1 in the denominator, and TRL's epsilon; about 0, one value has a spread too."""
    return math.sqrt(math.fsum((value - about) ** 2 for value in values) / max(len(values) - 1, 1)) + _EPSILON


def nearly_equal(values: Sequence[float]) -> bool:
    """Whether values differ by no more than a rounding error of single precision."""
    return math.isclose(min(values), max(values), rel_tol=1e-6, abs_tol=1e-6)


def check_choice(option: str, given: Any, known: Iterable[str]) -> None:
    """Refuse a name that is none of those known.

    Raises:
        ConfigError: It is unknown.
    """
    names = tuple(known)
    if given not in names:
        raise ConfigError(f"{option} is unknown: {given!r}{did_you_mean(str(given), names)}")


def check_number(option: str, given: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse anything but a finite number in [low, high].

    Raises:
        ConfigError: It is something else.
    """
    is_number = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    if not (is_number and low <= given <= high):
        above = f"a finite number >= {low:g}" if math.isinf(high) else f"a number in [{low:g}, {high:g}]"
        expected = "a finite number" if math.isinf(low) else above
        raise ConfigError(f"{option} must be {expected}, got {given!r}")


def _groups(samples: Sequence[Sample]) -> dict[Hashable, list[int]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        groups[sample.group].append(index)
    return groups


def _divided(values: Sequence[float], by: float) -> list[float]:
    return [value / by for value in values]
