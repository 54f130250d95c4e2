"""Assign one advantage to every token, from the rollouts of all ranks and the settings."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Protocol, cast

from agentsgym.credit.advantages import step_group_sizes, token_advantages, zero_variance_fraction
from agentsgym.credit.filters import drop_groups, mask_truncated, penalize_truncated, uninformative_groups
from agentsgym.credit.rewards import place_on_tokens, scatter_to_tokens
from agentsgym.credit.seats import SeatSplit, split_seats
from agentsgym.credit.traits import reads_token_rewards
from agentsgym.credit.weights import aggregation_weights, invalid_turn_weights
from agentsgym.errors import ConfigError
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.credit._comparison import Scale
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.credit.shaping import PotentialShaping
    from agentsgym.types import Trajectory

TurnEntries = Sequence[Sequence[Any]]
"""One entry a turn of each rollout: a float, or one float a token of the turn."""


class AdvantageSettings(Protocol):
    """The settings that are read here; :class:`~agentsgym.training.config.GRPOEnvConfig` has them."""

    discount: float
    scale_rewards: str
    loss_aggregation: str | None
    max_completion_length: int | None
    invalid_turns: str
    zero_variance_groups: str
    min_group_size: int
    value_head: str | None

    @property
    def truncation(self) -> str:
        """The treatment of truncated rollouts: ``"keep"``, ``"penalize"`` or ``"mask"``."""
        ...

    @property
    def truncation_penalty(self) -> float:
        """What ``"penalize"`` subtracts."""
        ...

    def estimator(self) -> BoundEstimator | PotentialShaping:
        """A fresh estimator."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAdvantages:
    """Per-token advantages and value targets of this rank's rollouts, and which of them are trained on.

    Attributes:
        included: Whether each is trained on, (B,).
        advantages: One number a token of each, (T,).
        value_targets: The value head's target before each token, (T,), NaN for none; None without a value head.
        rollouts: Those of all ranks, as the estimator saw them: each role of one as a rollout of its own.
        num_tokens: Agent tokens that are trained on, over all ranks.
        metrics: Metrics of filters and advantages; empty in evaluation, where no group is trained on.
    """

    included: Sequence[bool]
    advantages: Sequence[Sequence[float]]
    value_targets: Sequence[Sequence[float]] | None
    rollouts: Sequence[ScoredRollout]
    num_tokens: int
    metrics: dict[str, float]

    @property
    def is_flat(self) -> bool:
        """Whether no rollout of any rank has an advantage other than zero; true of an evaluation too."""
        return not any(value for name, value in self.metrics.items() if name.startswith("advantage"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAdvantages:
    """What the estimator gives for each turn, before it is laid on tokens.

    Attributes:
        entries: One entry for each turn of each rollout, (N, K).
        weights: What the settings multiply it by, one list of weights each, (N, K).
        included: Whether each rollout is trained on, (N,).
        split: How they were taken apart by role.
        seen: The rollouts of one role each, as the estimator saw them.
        trained: The same, those that are in baselines and not in the loss marked as dropped.
        metrics: Metrics of filters and advantages; empty in evaluation.
    """

    entries: Sequence[Sequence[Any]]
    weights: Sequence[Sequence[Sequence[float]]]
    included: Sequence[bool]
    split: SeatSplit
    seen: Sequence[ScoredRollout]
    trained: Sequence[ScoredRollout]
    metrics: dict[str, float]


class AdvantageAssigner:
    """The filters, the estimator and the weights of a run.

    Every method takes the rollouts of all ranks and returns the same on each of them. (Not collective.)

    Attributes:
        estimator: The one that the settings name; its ``state`` is what it keeps between batches.
    """

    def __init__(self, args: AdvantageSettings) -> None:
        """Build the estimator that the settings name."""
        self._args = args
        self.estimator: BoundEstimator | PotentialShaping = args.estimator()

    def assign(
        self,
        rollouts: Sequence[ScoredRollout],
        mine: range,
        trajectories: Sequence[Trajectory],
        num_tokens: Sequence[int],
        *,
        is_training: bool,
    ) -> TokenAdvantages:
        """Filter the rollouts, call the estimator, and lay its advantages on the tokens of this rank's rollouts.

        Args:
            rollouts: Those of all ranks, (N,).
            mine: Which of them are this rank's, (B,).
            trajectories: This rank's, (B,).
            num_tokens: Agent tokens of each rollout that can be trained on, (N,).
            is_training: False skips the filters and leaves the estimator's state as it is.
        """
        found = self.estimate(rollouts, is_training=is_training)
        advantages: list[list[float]] = []
        for i, trajectory in zip(mine, trajectories, strict=True):
            own = token_advantages(trajectory, found.entries[i], estimator=self.estimator)
            for weight in found.weights:
                factors = place_on_tokens(trajectory, weight[i], "each")
                own = [advantage * factor for advantage, factor in zip(own, factors, strict=True)]
            advantages.append(own)
        targets = None
        if self._args.value_head is not None:
            nested = found.split.merge(self.estimator.value_targets(found.trained, discount=self._args.discount))
            targets = [
                scatter_to_tokens(row, nested[i], fill=math.nan) for i, row in zip(mine, trajectories, strict=True)
            ]
        return TokenAdvantages(
            included=[found.included[i] for i in mine],
            advantages=advantages,
            value_targets=targets,
            rollouts=found.seen,
            num_tokens=sum(count for counts, count in zip(found.included, num_tokens, strict=True) if counts),
            metrics=found.metrics,
        )

    def estimate(self, rollouts: Sequence[ScoredRollout], *, is_training: bool) -> TurnAdvantages:
        """Filter the rollouts, call the estimator, and weigh its numbers, turn by turn.

        Args:
            rollouts: Those of all ranks, (N,).
            is_training: False skips the filters and leaves the estimator's state as it is.
        """
        takes_token_rewards = reads_token_rewards(self.estimator.traits)
        split = split_seats(rollouts, untold="keep" if takes_token_rewards else "refuse")
        seen, metrics = filter_rollouts(split.rollouts, self._args) if is_training else (list(split.rollouts), {})
        entries = self.turn_advantages(seen, is_training=is_training)
        trained = seen
        if is_training and self._args.truncation == "mask":  # they stay in the baselines
            trained = mask_truncated(seen)
        return TurnAdvantages(
            entries=split.merge(entries),
            weights=[split.merge(weight) for weight in self._turn_weights(trained)],
            included=split.included(trained),
            split=split,
            seen=seen,
            trained=trained,
            metrics=metrics | advantage_metrics(seen, entries, split) if is_training else {},
        )

    def turn_advantages(self, rollouts: Sequence[ScoredRollout], *, is_training: bool) -> TurnEntries:
        """Call the estimator; in evaluation its state stays as it is.

        Raises:
            ConfigError: It does not return one list a rollout and one finite number a turn (or one a token of it).
        """
        estimator = self.estimator if is_training else copy.deepcopy(self.estimator)
        scale = cast("Scale", self._args.scale_rewards)  # the configuration has checked it
        entries = estimator(rollouts, discount=self._args.discount, scale=scale)
        if not _is_list(entries) or len(entries) != len(rollouts):
            raise ConfigError(
                f"advantage_estimator {estimator.name!r} must return one list of numbers for each of {len(rollouts)} "
                f"rollouts, got {len(entries) if _is_list(entries) else shown(entries)}"
            )
        plain = [_plain_turns(own, rollout) for own, rollout in zip(entries, rollouts, strict=True)]
        for i, (rollout, turns) in enumerate(zip(rollouts, plain, strict=True)):
            if turns is None:
                raise ConfigError(
                    f"advantage_estimator {estimator.name!r} must return one finite number for each of the "
                    f"{len(rollout.turn_rewards)} turns of rollout {i}, or a list of one per token for turns of "
                    f"{list(rollout.token_counts)} tokens, got {shown(entries[i])}"
                )
        return cast("TurnEntries", plain)

    def _turn_weights(self, rollouts: Sequence[ScoredRollout]) -> list[list[list[float]]]:
        """The weights of each turn by the settings, each of shape (N, K); empty where they set none."""
        args, found = self._args, list[list[list[float]]]()
        if args.loss_aggregation is not None:
            found.append(
                aggregation_weights(
                    [list(rollout.token_counts) for rollout in rollouts],
                    [rollout.group for rollout in rollouts],
                    [rollout.included for rollout in rollouts],
                    args.loss_aggregation,
                    constant=args.max_completion_length,
                )
            )
        if args.invalid_turns != "keep":
            found.append(invalid_turn_weights([list(rollout.invalid) for rollout in rollouts], args.invalid_turns))
        return found


def filter_rollouts(
    rollouts: Sequence[ScoredRollout], args: AdvantageSettings
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Choose the rollouts of a training batch that are trained on.

    Args:
        rollouts: Those of all ranks, each of one role, (N,).
        args: The settings.

    Returns:
        The rollouts, those left out marked as dropped; and the metrics ``groups/kept``, the fraction of task groups
        that are trained on, and ``frac_reward_zero_std``, the fraction of those without variance before any is
        dropped.
    """
    seen, dropped = _penalized_and_uninformative(rollouts, args)
    groups = {rollout.group for rollout in rollouts}
    metrics = {
        "frac_reward_zero_std": zero_variance_fraction(seen),
        "groups/kept": 1 - len(dropped) / len(groups) if groups else 0.0,
    }
    return drop_groups(seen, dropped), metrics


def uninformative_task_groups(rollouts: Sequence[ScoredRollout], args: AdvantageSettings) -> set[int]:
    """Find the task groups to drop or to resample: those of all roles too small, or without variance."""
    split = split_seats(rollouts, untold="keep")
    return split.task_groups(_penalized_and_uninformative(split.rollouts, args)[1])


def _penalized_and_uninformative(
    rollouts: Sequence[ScoredRollout], args: AdvantageSettings
) -> tuple[list[ScoredRollout], set[int]]:
    """The rollouts, each of one role, after the penalty of truncated ones; and the groups to drop of these."""
    is_penalized = args.truncation == "penalize"
    seen = penalize_truncated(rollouts, args.truncation_penalty) if is_penalized else list(rollouts)
    drop = args.zero_variance_groups != "keep"
    return seen, uninformative_groups(seen, min_group_size=args.min_group_size, drop_zero_variance=drop)


def advantage_metrics(rollouts: Sequence[ScoredRollout], entries: TurnEntries, split: SeatSplit) -> dict[str, float]:
    """Summarize advantages by turn index and by role, and the sizes of step groups.

    Args:
        rollouts: The rollouts as the estimator saw them.
        entries: What it gave.
        split: How they were taken apart by role, so that the index of a turn is that in the whole rollout.
    """
    by_index: dict[int, list[float]] = {}
    by_role: dict[Hashable, list[float]] = {}
    for i, (rollout, turns) in enumerate(zip(rollouts, entries, strict=True)):
        pairs = zip(split.places[i][1], turns, strict=True)
        for own, (k, entry) in enumerate(pairs) if rollout.included else ():
            values = cast("Sequence[float]", entry if isinstance(entry, Sequence) else [entry])
            by_index.setdefault(k, []).extend(values)
            by_role.setdefault(rollout.role(own), []).extend(values)
    metrics: dict[str, float] = {}
    named = {f"by_role/{role}": values for role, values in by_role.items() if role is not None}
    for name, values in ({f"turn_{k:02d}": values for k, values in by_index.items()} | named).items():
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
    """One entry a turn, as plain numbers; None if it is something else."""
    if not _is_list(own) or len(own) != len(rollout.turn_rewards):
        return None
    entries = [_plain(entry) for entry in own]
    lists_fit = all(
        len(entry) == num_tokens
        for entry, num_tokens in zip(entries, rollout.token_counts, strict=False)  # empty where it is not known
        if isinstance(entry, list)
    )
    return entries if lists_fit and None not in entries else None


def _plain(entry: Any) -> float | list[float] | None:
    """A finite number, or a list of such, whatever their type was; None if it is neither."""
    try:
        numbers = [math.nan if isinstance(one, str) else float(one) for one in (entry if _is_list(entry) else [entry])]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from a tensor of several elements
        return None
    if not all(map(math.isfinite, numbers)):
        return None
    return numbers if _is_list(entry) else numbers[0]
