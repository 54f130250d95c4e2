"""Decide which rollouts are trained on, and compute one advantage for every token from those of all ranks."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.credit.advantages import step_group_sizes, token_advantages, zero_variance_groups
from agentsgym.credit.components import UNNAMED
from agentsgym.credit.objectives import (
    Weights,
    add_component,
    check_names,
    check_objectives,
    component,
    component_names,
    missing_names,
    summed,
    weighted,
)
from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.credit.roles import RoleSplit, environment_suffix, split_roles
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.traits import reads_token_rewards
from agentsgym.credit.weights import aggregation_weights, invalid_turn_weights
from agentsgym.errors import ConfigError
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.credit._comparison import Scale
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.settings import CreditArgs
    from agentsgym.types import Trajectory


logger = logging.getLogger(__name__)

PENALTY: Final = ""
"""The name of the penalty of truncated rollouts as a component, which no reward of an environment can have."""

TurnEntries = Sequence[Sequence[Any]]
"""One entry per turn of each rollout: a float, or a list with one float per token of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Per-token advantages and value targets of this rank's rollouts, and which of them are trained on.

    Attributes:
        included: Whether each rollout is trained on, (B,).
        advantages: For each rollout, one number per token, (T,).
        weights: What ``loss_aggregation`` and ``invalid_turns`` multiply a token's term by, already in the advantages,
            (T,).
        kept_turns: 0.0 for each turn that ``invalid_turns`` excludes, else 1.0, (K,).
        value_targets: The value head's target before each token, (T,), NaN where there is none; None without a value
            head.
        rollouts: The rollouts of all ranks as passed to the estimator: each role is a separate rollout.
        num_tokens: Number of agent tokens that are trained on, over all ranks.
        metrics: Metrics of filters and advantages; empty in evaluation.
    """

    included: Sequence[bool]
    advantages: Sequence[Sequence[float]]
    weights: Sequence[Sequence[float]]
    kept_turns: Sequence[Sequence[float]]
    value_targets: Sequence[Sequence[float]] | None
    rollouts: Sequence[ScoredRollout]
    num_tokens: int
    metrics: dict[str, float]

    @property
    def is_flat(self) -> bool:
        """Whether every advantage on every rank is zero; also true in an evaluation."""
        return not any(value for name, value in self.metrics.items() if name.startswith("advantage"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdvantages:
    """The estimator's entries for turns, before they are assigned to tokens.

    Attributes:
        entries: One entry per turn of each rollout, (N, K).
        weights: Factors for the entries, (N, K).
        kept: 0.0 for the turns that ``invalid_turns`` excludes, else 1.0, (N, K); a part of ``weights``.
        included: Whether each rollout is trained on, (N,).
        split: The rollouts split by role.
        seen: The rollouts of one role each, as passed to the estimator.
        trained: The same rollouts, but those that count only in baselines and not in the loss are marked as dropped.
        metrics: Metrics of filters and advantages; empty in evaluation.
    """

    entries: Sequence[Sequence[Any]]
    weights: Sequence[Sequence[float]]
    kept: Sequence[Sequence[float]]
    included: Sequence[bool]
    split: RoleSplit
    seen: Sequence[ScoredRollout]
    trained: Sequence[ScoredRollout]
    metrics: dict[str, float]


class AdvantageAssigner:
    """The filters, the estimator and the weights of a run.

    Every method receives the rollouts of all ranks and returns the same result on each rank. (Not collective.)

    Attributes:
        estimator: The estimator that the settings name, with its state from earlier batches.
    """

    def __init__(self, args: CreditArgs) -> None:
        """Build the estimator that the settings name.

        Raises:
            ConfigError: The estimator cannot apply the settings of named rewards.
        """
        self._args = args
        self.estimator: BoundEstimator = args.estimator()
        check_objectives(args, self.estimator)
        self._has_first_batch = False
        self._reported_names: set[str] = set()

    def assign(
        self,
        rollouts: Sequence[ScoredRollout],
        local_indices: Sequence[int],
        trajectories: Sequence[Trajectory],
        num_tokens: Sequence[int],
        *,
        is_training: bool,
    ) -> TokenAdvantages:
        """Filter the rollouts, call the estimator, and assign its advantages to the tokens of this rank's rollouts.

        Args:
            rollouts: The rollouts of all ranks, (N,).
            local_indices: Indices of this rank's rollouts, (B,).
            trajectories: This rank's trajectories, (B,).
            num_tokens: Number of agent tokens of each rollout that can be trained on, (N,).
            is_training: False skips the filters and leaves the estimator's state unchanged.

        Raises:
            ConfigError: ``reward_weights`` has a name that no rollout of the first batch has, or the estimator follows
                a tree of calls that no rollout of the first batch has.
        """
        if is_training:
            self._check_batch(rollouts)
        found = self.estimate(rollouts, is_training=is_training)
        advantages: list[list[float]] = []
        weights: list[list[float]] = []
        for i, trajectory in zip(local_indices, trajectories, strict=True):
            own = token_advantages(trajectory, found.entries[i], estimator=self.estimator)
            weights.append(scatter_to_tokens(trajectory, found.weights[i]))
            advantages.append([advantage * weight for advantage, weight in zip(own, weights[-1], strict=True)])
        targets = None
        if self._args.value_head is not None:
            nested = found.split.merge(self.estimator.value_targets(found.trained, discount=self._args.discount))
            targets = [
                scatter_to_tokens(row, nested[i], fill=math.nan)
                for i, row in zip(local_indices, trajectories, strict=True)
            ]
        return TokenAdvantages(
            included=[found.included[i] for i in local_indices],
            advantages=advantages,
            weights=weights,
            kept_turns=[found.kept[i] for i in local_indices],
            value_targets=targets,
            rollouts=found.seen,
            num_tokens=sum(compress(num_tokens, found.included)),
            metrics=found.metrics,
        )

    def estimate(self, rollouts: Sequence[ScoredRollout], *, is_training: bool) -> TurnAdvantages:
        """Filter the rollouts and estimate the advantage of each turn.

        Args:
            rollouts: The rollouts of all ranks, (N,).
            is_training: False skips the filters and leaves the estimator's state unchanged.
        """
        args = self._args
        takes_token_rewards = reads_token_rewards(self.estimator.traits)
        rollouts = weighted(rollouts, args.reward_weights)
        split = split_roles(rollouts, shared_rewards="keep" if takes_token_rewards else "refuse")
        seen, metrics = filter_rollouts(split.rollouts, args) if is_training else (list(split.rollouts), {})
        entries = self.turn_advantages(seen, is_training=is_training)
        trained = seen
        if is_training and args.truncation == "mask":  # truncated rollouts stay in the baselines
            trained = [replace(rollout, dropped=True) if rollout.truncated else rollout for rollout in seen]
        invalid = [rollout.invalid or [False] * len(rollout.turn_rewards) for rollout in trained]
        weights = kept = invalid_turn_weights(invalid, args.invalid_turns)
        if args.loss_aggregation is not None:
            aggregated = aggregation_weights(
                [rollout.token_counts for rollout in trained],
                [rollout.group for rollout in trained],
                [rollout.included for rollout in trained],
                args.loss_aggregation,
                constant=args.max_completion_length,
            )
            weights = [
                [weight * factor for weight, factor in zip(*turns, strict=True)]
                for turns in zip(aggregated, kept, strict=True)
            ]
        return TurnAdvantages(
            entries=split.merge(entries),
            weights=split.merge(weights),
            kept=split.merge(kept),
            included=split.included(trained),
            split=split,
            seen=seen,
            trained=trained,
            metrics=metrics | advantage_metrics(seen, entries, split) if is_training else {},
        )

    def turn_advantages(self, rollouts: Sequence[ScoredRollout], *, is_training: bool) -> TurnEntries:
        """Call the estimator, once or once per component; in evaluation its state stays unchanged.

        Raises:
            ConfigError: The estimator does not return one list per rollout, with one finite number per turn or per
                token of the turn.
        """
        args, estimator = self._args, self.estimator if is_training else copy.deepcopy(self.estimator)
        if args.multi_objective_aggregation == "sum_then_normalize":
            return self._entries(estimator, rollouts)
        factors: Weights = args.reward_weights or {}
        parts = [
            (weight, self._entries(estimator, [component(one, name) for one in rollouts]))
            for name in component_names(rollouts)
            if (weight := factors.get(name, 1.0))
        ]
        return summed(parts, rollouts, args.scale_rewards)

    def _check_batch(self, rollouts: Sequence[ScoredRollout]) -> None:
        """Check the settings by the first batch, and report once each component that only some rollouts have."""
        if not self._has_first_batch and any(one.included for one in rollouts):
            check_names(rollouts, self._args.reward_weights or {})
            check_parents(rollouts, self.estimator)
            self._has_first_batch = True
        for name, environment in missing_names(rollouts).items():
            if name not in self._reported_names:
                self._reported_names.add(name)
                text = "only some rollouts%s have the reward %r; in the others it counts as 0"
                logger.warning(text, environment_suffix(environment), name)

    def _entries(self, estimator: BoundEstimator, rollouts: Sequence[ScoredRollout]) -> list[list[Any]]:
        """Call the estimator, and check what it returns."""
        scale = cast("Scale", self._args.scale_rewards)  # the configuration has checked it
        entries = estimator(rollouts, discount=self._args.discount, scale=scale)
        if not _is_list(entries) or len(entries) != len(rollouts):
            raise ConfigError(
                f"advantage_estimator {estimator.name!r} must return one list of numbers for each of {len(rollouts)} "
                f"rollouts, got {len(entries) if _is_list(entries) else shown(entries)}"
            )
        plain: list[list[Any]] = []
        for i, (rollout, own) in enumerate(zip(rollouts, entries, strict=True)):
            turns = _plain_turns(own, rollout)
            if turns is None:
                raise ConfigError(
                    f"advantage_estimator {estimator.name!r} must return one finite number for each of the "
                    f"{len(rollout.turn_rewards)} turns of rollout {i}, or a list of one per token (the turns have "
                    f"{list(rollout.token_counts)} tokens), got {shown(own)}"
                )
            plain.append(turns)
        return plain


def check_parents(rollouts: Sequence[ScoredRollout], estimator: BoundEstimator) -> None:
    """Reject an estimator that follows a tree of calls if rollouts have several turns, none of which has a parent."""
    uses = frozenset[str]() if estimator.traits is None else estimator.traits.uses
    played = [one for one in rollouts if one.included and len(one.turn_rewards) > 1]
    if "parents" in uses and played and all(parent is None for one in played for parent in one.parents):
        raise ConfigError(
            f"the estimator {estimator.name!r} follows a tree of calls, but no turn of these rollouts has a parent, so "
            "each turn would be credited with its own reward alone: set follow='turns', or Turn.parent in the "
            "environment"
        )


def advantage_metrics(rollouts: Sequence[ScoredRollout], entries: TurnEntries, split: RoleSplit) -> dict[str, float]:
    """Summarize advantages by turn index and by role, and the sizes of step groups.

    Args:
        rollouts: The rollouts as passed to the estimator.
        entries: The estimator's entries.
        split: The split by role that produced the rollouts; turn indices are those in the unsplit rollouts.
    """
    by_turn: dict[str, list[float]] = {}
    by_role: dict[Hashable, list[float]] = {}
    for i, (rollout, turns) in enumerate(zip(rollouts, entries, strict=True)):
        pairs = zip(split.places[i][1], turns, strict=True)
        for own, (k, entry) in enumerate(pairs) if rollout.included else ():
            values = cast("Sequence[float]", entry if isinstance(entry, Sequence) else [entry])
            by_turn.setdefault(f"turn_{k:02d}", []).extend(values)
            by_role.setdefault(rollout.role(own), []).extend(values)
    metrics: dict[str, float] = {}
    named = {f"by_role/{role}": values for role, values in by_role.items() if role is not None}
    for name, values in (by_turn | named).items():
        metrics[f"advantage/{name}"] = fmean(values) if values else 0.0
        metrics[f"advantage_std/{name}"] = stdev(values) if len(values) > 1 else 0.0
    if sizes := step_group_sizes(rollouts):
        metrics["step_groups/mean_size"] = fmean(sizes)
        metrics["step_groups/max_size"] = float(max(sizes))
        metrics["step_groups/singleton_fraction"] = sizes.count(1) / sum(sizes)
    return metrics


def _is_list(entry: Any) -> bool:
    return isinstance(entry, Sequence) and not isinstance(entry, str)


def _plain_turns(own: Any, rollout: ScoredRollout) -> list[Any] | None:
    """Convert the entry of each turn to a finite float or a list of finite floats; None if that is not possible."""
    if not _is_list(own) or len(own) != len(rollout.turn_rewards):
        return None
    turns: list[Any] = []
    for entry, num_tokens in zip(own, rollout.token_counts or [None] * len(own), strict=True):
        is_list = _is_list(entry)
        if is_list and num_tokens not in (None, len(entry)):
            return None
        try:
            numbers = [math.nan if isinstance(one, str) else float(one) for one in (entry if is_list else [entry])]
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: from a tensor of several elements
            return None
        if not all(map(math.isfinite, numbers)):
            return None
        turns.append(numbers if is_list else numbers[0])
    return turns


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
            own = add_component(rollout, PENALTY, -args.truncation_penalty)
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
