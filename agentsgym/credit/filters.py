"""Decide which rollouts of a generation batch are trained on, and find task groups without information."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentsgym.credit.advantages import zero_variance_groups
from agentsgym.credit.components import UNNAMED
from agentsgym.credit.objectives import Weights, add_component, component, component_names, weighted
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
    num_included = len({one.group for one in penalized if one.included})
    metrics = {
        "frac_reward_zero_std": len(_flat_groups(penalized, args)) / num_included if num_included else 0.0,
        "groups/kept": 1 - len(uninformative) / len(groups) if groups else 0.0,
    }
    return [replace(one, dropped=True) if one.group in uninformative else one for one in penalized], metrics


def uninformative_task_groups(rollouts: Sequence[ScoredRollout], args: CreditArgs) -> set[int]:
    """Find the task groups to drop or resample: those that are too small or have no variance, for every role."""
    split = split_roles(weighted(rollouts, args.reward_weights), shared_rewards="keep")
    return split.task_groups(_penalized_and_uninformative(split.rollouts, args)[1])


def _penalized_and_uninformative(
    rollouts: Sequence[ScoredRollout], args: CreditArgs
) -> tuple[list[ScoredRollout], set[int]]:
    """Penalize truncated rollouts, each of one role; then find groups that are too small or have no variance."""
    penalized = list(rollouts)
    for i, rollout in enumerate(rollouts):
        if args.truncation == "penalize" and rollout.truncated:
            own = add_component(rollout, "truncation_penalty", -args.truncation_penalty)
            is_summed = args.multi_objective_aggregation == "sum_then_normalize"
            penalized[i] = replace(own, components=rollout.components) if is_summed else own
    sizes = Counter(rollout.group for rollout in penalized if rollout.included)
    groups = {rollout.group for rollout in penalized if sizes[rollout.group] < args.min_group_size}
    return penalized, groups if args.zero_variance_groups == "keep" else groups | _flat_groups(penalized, args)


def _flat_groups(rollouts: Sequence[ScoredRollout], args: CreditArgs) -> set[int]:
    """Find groups without variance; if components are compared separately, those in which none has any."""
    if args.multi_objective_aggregation == "sum_then_normalize":
        return zero_variance_groups(rollouts)
    weights: Weights = args.reward_weights or {}
    names = [name for name in component_names(rollouts) if weights.get(name, 1)] or [UNNAMED]
    flat = [zero_variance_groups([component(one, name) for one in rollouts]) for name in names]
    return flat[0].intersection(*flat)
