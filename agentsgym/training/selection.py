"""Which rollouts of a generation batch are learnt from, and which task groups are played again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentsgym.credit.advantages import zero_variance_groups

if TYPE_CHECKING:
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory


def penalise_truncated(
    rollouts: Sequence[ScoredRollout], trajectories: Sequence[Trajectory], args: GRPOEnvConfig
) -> list[ScoredRollout]:
    """What an estimator is to see of the rollouts that a budget ended, where the settings put a penalty on that.

    Args:
        rollouts: Those of all ranks, (B,).
        trajectories: The same rollouts, (B,).
        args: Read for ``truncated_rollouts`` and ``truncation_penalty``, which comes off the last turn's reward and off
            the final reward.

    Returns:
        (B,).
    """
    if args.truncated_rollouts != "penalise":
        return list(rollouts)
    return [
        _penalised(rollout, args.truncation_penalty) if trajectory.stop_reason.truncated else rollout
        for rollout, trajectory in zip(rollouts, trajectories, strict=True)
    ]


def mask_truncated(
    rollouts: Sequence[ScoredRollout], trajectories: Sequence[Trajectory], args: GRPOEnvConfig
) -> list[ScoredRollout]:
    """Leave out what a budget ended, where the settings mask it: after an estimator, whose baselines it stays in.

    Args:
        rollouts: Those of all ranks, (B,).
        trajectories: The same rollouts, (B,).
        args: Read for ``truncated_rollouts``.

    Returns:
        (B,).
    """
    if args.truncated_rollouts != "mask":
        return list(rollouts)
    return [
        replace(rollout, dropped=rollout.dropped or trajectory.stop_reason.truncated)
        for rollout, trajectory in zip(rollouts, trajectories, strict=True)
    ]


def useless_groups(rollouts: Sequence[ScoredRollout], args: GRPOEnvConfig) -> set[int]:
    """The task groups that are not to be learnt from: too small, or of one final reward where that is filtered."""
    sizes = Counter(rollout.group for rollout in rollouts if rollout.counts)
    too_small = {rollout.group for rollout in rollouts if sizes[rollout.group] < args.min_group_size}
    return too_small if args.zero_variance_groups == "keep" else too_small | zero_variance_groups(rollouts)


def drop_groups(rollouts: Sequence[ScoredRollout], groups: set[int]) -> list[ScoredRollout]:
    """Leave whole task groups out."""
    return [replace(rollout, dropped=True) if rollout.group in groups else rollout for rollout in rollouts]


def _penalised(rollout: ScoredRollout, penalty: float) -> ScoredRollout:
    rewards = list(rollout.turn_rewards)
    rewards[-1:] = [reward - penalty for reward in rewards[-1:]]
    return replace(rollout, turn_rewards=rewards, final_reward=rollout.final_reward - penalty)
