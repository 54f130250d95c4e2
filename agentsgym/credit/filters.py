"""Decide which rollouts of a generation batch are trained on, and which task groups carry no information."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from agentsgym.credit.advantages import zero_variance_groups
from agentsgym.credit.scored import ScoredRollout


def penalize_truncated(rollouts: Sequence[ScoredRollout], penalty: float) -> list[ScoredRollout]:
    """Subtract a penalty from the rollouts that a budget ended, before an estimator sees them.

    Args:
        rollouts: Those of all ranks, (B,).
        penalty: What is subtracted from the last turn's reward and from the final reward.

    Returns:
        (B,).
    """
    seen = list(rollouts)
    for i, rollout in enumerate(rollouts):
        if rollout.truncated:
            rewards = list(rollout.turn_rewards)
            rewards[-1:] = [reward - penalty for reward in rewards[-1:]]
            seen[i] = replace(rollout, turn_rewards=rewards, final_reward=rollout.final_reward - penalty)
    return seen


def mask_truncated(rollouts: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """Drop the rollouts that a budget ended, after an estimator, so that they stay in its baselines.

    Args:
        rollouts: Those of all ranks, (B,).

    Returns:
        (B,).
    """
    return [replace(rollout, dropped=True) if rollout.truncated else rollout for rollout in rollouts]


def uninformative_groups(
    rollouts: Sequence[ScoredRollout], *, min_group_size: int, drop_zero_variance: bool
) -> set[int]:
    """Find the task groups that should not be trained on.

    Args:
        rollouts: Those of all ranks, (B,).
        min_group_size: Groups with fewer included rollouts are among them.
        drop_zero_variance: Whether groups whose final rewards are all equal are among them.

    Returns:
        Their ``group``.
    """
    sizes = Counter(rollout.group for rollout in rollouts if rollout.included)
    too_small = {rollout.group for rollout in rollouts if sizes[rollout.group] < min_group_size}
    return too_small | zero_variance_groups(rollouts) if drop_zero_variance else too_small


def drop_groups(rollouts: Sequence[ScoredRollout], groups: Collection[int]) -> list[ScoredRollout]:
    """Drop whole task groups.

    Args:
        rollouts: Those of all ranks, (B,).
        groups: The ``group`` of each that is dropped.

    Returns:
        (B,).
    """
    return [replace(rollout, dropped=True) if rollout.group in groups else rollout for rollout in rollouts]
