"""Place rewards between random play (0) and optimal play (1), with an interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from agentsgym.envs.spec import Anchors
from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed
from agentsgym.statistics.intervals import NUM_RESAMPLES, Estimate, draws
from agentsgym.texts import shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Mean rewards of random and optimal play: the same for all tasks, or a function of the task; None if unknown.
AnchorSource = Anchors | Callable[[Mapping[str, Any]], Anchors | None]


def anchors_of_info(info: Mapping[str, Any]) -> Anchors | None:
    """Read the anchors from ``info["random_reward"]`` and ``info["optimal_reward"]``; None if they are missing."""
    random, optimal = info.get("random_reward"), info.get("optimal_reward")
    return None if random is None or optimal is None else Anchors(random=float(random), optimal=float(optimal))


def anchors_of_task(source: AnchorSource, task_data: Mapping[str, Any], num_episodes: int = 1) -> Anchors | None:
    """Look up a task's anchors.

    Args:
        source: Anchors of all tasks, or a function that returns a task's anchors.
        task_data: The task.
        num_episodes: Number of episodes over which the final reward is summed.
    """
    anchors: Any = source if isinstance(source, Anchors) or not callable(source) else source(task_data)
    if anchors is None and callable(source):
        return None
    if not isinstance(anchors, Anchors):
        raise ConfigError(
            "references must be Anchors(random=…, optimal=…) or a function that returns them for a task's data, "
            f"got {shown(anchors)}"
        )
    return Anchors(random=anchors.random * num_episodes, optimal=anchors.optimal * num_episodes)


def fraction_with_interval(sums: NDArray[np.float64], *, confidence: float, seed: int) -> Estimate | None:
    """Estimate ``(E[reward] − E[random]) / (E[optimal] − E[random])``, with a bootstrap interval over clusters.

    This is a ratio of means, not a mean of ratios: tasks with a larger range of rewards weigh more, and tasks in which
    random play is optimal do no harm. Each resample draws C of the C clusters with replacement and computes the ratio
    from the sums of the drawn clusters (Efron & Tibshirani 1993, chapter 13).

    Args:
        sums: Sums of rewards, random anchors and optimal anchors per cluster, (C, 3).
        confidence: Confidence level of the interval, in (0, 1).
        seed: Random seed of the resamples.

    Returns:
        The estimate; None if random play is optimal, so that there is no range.
    """
    mean = float(_ratio(sums.sum(axis=0)))
    if not np.isfinite(mean):
        return None
    resamples = draws(len(sums), NUM_RESAMPLES, derive_seed("bootstrap of a ratio", seed))
    known = np.concatenate([_ratio(sums[drawn].sum(axis=1)) for drawn in resamples])
    low, high = np.quantile(known[np.isfinite(known)], [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean=mean, low=min(float(low), mean), high=max(float(high), mean))


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    reward, random, optimal = np.moveaxis(sums, -1, 0)
    span = optimal - random
    has_range = span > 1e-12 * np.maximum(1.0, np.abs(optimal))
    return np.where(has_range, (reward - random) / np.where(has_range, span, 1.0), np.nan)
