"""Decide which rollouts of a generation batch are trained on, and find task groups without information."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentsgym.credit.advantages import zero_variance_fraction, zero_variance_groups
from agentsgym.credit.roles import split_roles
from agentsgym.credit.scored import ScoredRollout

if TYPE_CHECKING:
    from agentsgym.credit.settings import CreditArgs


def filter_rollouts(
    rollouts: Sequence[ScoredRollout], args: CreditArgs
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Choose the rollouts of a training batch to train on.

    Args:
        rollouts: The rollouts of all ranks, each of one role, (N,).
        args: The settings.

    Returns:
        The rollouts, with excluded ones marked as dropped; and the metrics ``groups/kept``, the fraction of groups that
        are trained on, and ``frac_reward_zero_std``, the fraction of groups without variance before any is dropped.
    """
    penalized, uninformative = _penalized_and_uninformative(rollouts, args)
    groups = {rollout.group for rollout in rollouts}
    metrics = {
        "frac_reward_zero_std": zero_variance_fraction(penalized),
        "groups/kept": 1 - len(uninformative) / len(groups) if groups else 0.0,
    }
    return [replace(one, dropped=True) if one.group in uninformative else one for one in penalized], metrics


def uninformative_task_groups(rollouts: Sequence[ScoredRollout], args: CreditArgs) -> set[int]:
    """Find the task groups to drop or resample: those that are too small or have no variance, for every role."""
    split = split_roles(rollouts, shared_rewards="keep")
    return split.task_groups(_penalized_and_uninformative(split.rollouts, args)[1])


def _penalized_and_uninformative(
    rollouts: Sequence[ScoredRollout], args: CreditArgs
) -> tuple[list[ScoredRollout], set[int]]:
    """Penalize truncated rollouts, each of one role; then find groups that are too small or have no variance."""
    penalized = list(rollouts)
    for i, rollout in enumerate(rollouts):
        if args.truncation == "penalize" and rollout.truncated:
            rewards = list(rollout.turn_rewards)
            rewards[-1:] = [reward - args.truncation_penalty for reward in rewards[-1:]]
            final_reward = rollout.final_reward - args.truncation_penalty
            penalized[i] = replace(rollout, turn_rewards=rewards, final_reward=final_reward)
    sizes = Counter(rollout.group for rollout in penalized if rollout.included)
    groups = {rollout.group for rollout in penalized if sizes[rollout.group] < args.min_group_size}
    return penalized, groups if args.zero_variance_groups == "keep" else groups | zero_variance_groups(penalized)
