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


def treat_truncated(
    rollouts: Sequence[ScoredRollout], trajectories: Sequence[Trajectory], args: GRPOEnvConfig
) -> list[ScoredRollout]:
    """Keep, penalise or drop the rollouts that a budget ended.

    Args:
        rollouts: Those of all ranks, (B,).
        trajectories: The same rollouts, (B,).
        args: Read for ``truncated_rollouts`` and ``truncation_penalty``, which comes off the last turn's reward and off
            the final reward.

    Returns:
        (B,).
    """
    if args.truncated_rollouts == "keep":
        return list(rollouts)
    treated = [
        replace(rollout, dropped=True)
        if args.truncated_rollouts == "mask"
        else _penalised(rollout, args.truncation_penalty)
        for rollout in rollouts
    ]
    return [
        other if trajectory.stop_reason.truncated else rollout
        for rollout, other, trajectory in zip(rollouts, treated, trajectories, strict=True)
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
