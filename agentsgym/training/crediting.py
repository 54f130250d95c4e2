"""From the rollouts of all ranks to one advantage a token, as the settings say."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, cast

from agentsgym.credit.advantages import (
    gigpo,
    step_group_sizes,
    token_advantages,
    zero_variance_share,
)
from agentsgym.credit.gae import targets_of, turn_gae
from agentsgym.credit.rewards import place_on_tokens, token_counts
from agentsgym.credit.shaping import PotentialShaping, shaped
from agentsgym.credit.weights import aggregation_weights, invalid_turn_weights
from agentsgym.errors import ConfigError
from agentsgym.training import _trl
from agentsgym.training.rules import CRITICS, OF_RETURNS, UNDISCOUNTED, compares_in_task_groups, correction_of
from agentsgym.training.selection import drop_groups, mask_truncated, penalise_truncated, useless_groups

if TYPE_CHECKING:
    from agentsgym.credit._comparison import Scale
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.playing import Played
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)

Numbers = Sequence[Sequence[Any]]
"""One entry a turn of each rollout: a float, or one float a token of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """What this rank's rollouts are learnt with.

    Attributes:
        counts: Whether each is learnt from, (B,).
        advantages: One number a token of each, (T,).
        value_targets: What a value head is to learn before each token, (T,), NaN for nothing; None without one.
    """

    counts: list[bool]
    advantages: list[list[float]]
    value_targets: list[list[float]] | None


_SMALL_GROUP = 16
_LONG_ROLLOUT = 500


class Crediting:
    """Filters, estimator and weights of a run.

    Every method takes the rollouts of all ranks and gives the same on each of them.

    Attributes:
        estimator: As the settings say; what it keeps between batches is in its ``memory``.
    """

    def __init__(self, args: GRPOEnvConfig) -> None:
        """Take the settings."""
        self._args = args
        self.estimator = args.estimator()
        self._warned: set[str] = set()

    def selected(
        self, rollouts: Sequence[ScoredRollout], trajectories: Sequence[Trajectory]
    ) -> tuple[list[ScoredRollout], dict[str, float]]:
        """Decide which rollouts of a training batch are learnt from.

        Returns:
            The rollouts, those left out marked as dropped, and the metrics ``groups/kept``, the share of task groups
            that are learnt from, and ``frac_reward_zero_std``, the share of those without variance before any is
            dropped.
        """
        treated = penalise_truncated(rollouts, trajectories, self._args)
        useless = useless_groups(treated, self._args)
        metrics = {"frac_reward_zero_std": zero_variance_share(treated)}
        groups = {rollout.group for rollout in rollouts}
        kept = drop_groups(treated, useless)
        self._warn_of(kept, trajectories)
        if not any(rollout.counts for rollout in mask_truncated(kept, trajectories, self._args)):
            self._warn_once("no rollout of the generation batch is left to learn from: all failed or were filtered out")
        return kept, {**metrics, "groups/kept": 1 - len(useless) / len(groups) if groups else 0.0}

    def turn_advantages(self, rollouts: Sequence[ScoredRollout], *, is_training: bool) -> Numbers:
        """Ask the estimator; in evaluation it keeps nothing for later.

        Raises:
            ConfigError: It does not return one list a rollout and one finite number a turn (or one a token of it).
        """
        estimator = self.estimator if is_training else copy.deepcopy(self.estimator)
        scale = cast("Scale", self._args.scale_rewards)  # the configuration has checked it
        numbers = estimator(rollouts, discount=self._args.discount, scale=scale)
        if not _is_list(numbers) or len(numbers) != len(rollouts):
            raise ConfigError(
                f"advantage_estimator {estimator.name!r} must return one list of numbers for each of {len(rollouts)} "
                f"rollouts, got {len(numbers) if _is_list(numbers) else repr(numbers)}"
            )
        plain = [_plain_turns(own, rollout) for own, rollout in zip(numbers, rollouts, strict=True)]
        for i, (rollout, turns) in enumerate(zip(rollouts, plain, strict=True)):
            if turns is None:
                raise ConfigError(
                    f"advantage_estimator {estimator.name!r} must return one finite number for each of the "
                    f"{len(rollout.turn_rewards)} turns of rollout {i}, or for one of {list(rollout.token_counts)} "
                    f"tokens a list of so many, got {numbers[i]!r}"
                )
        return cast("Numbers", plain)

    def credited(
        self, played: Played, rollouts: Sequence[ScoredRollout], numbers: Numbers, *, is_training: bool
    ) -> Credited:
        """Lay what the estimator gave on the tokens of this rank's rollouts, times the weights of their turns.

        Args:
            played: The generation batch.
            rollouts: As they were given to the estimator, those of all ranks.
            numbers: What it returned.
            is_training: Whether truncated rollouts are masked, if the settings say so.
        """
        if is_training:
            rollouts = mask_truncated(rollouts, played.everyone, self._args)
        weights = self._weights(rollouts, played.everyone)
        mine = range(played.first, played.first + len(played.trajectories))
        advantages = [
            self._on_tokens(trajectory, numbers[i], [weight[i] for weight in weights])
            for i, trajectory in zip(mine, played.trajectories, strict=True)
        ]
        targets = None
        if self._args.value_head is not None:
            nested = self._value_targets(rollouts)
            targets = [_laid(row, nested[i]) for i, row in zip(mine, played.trajectories, strict=True)]
        return Credited(counts=[rollouts[i].counts for i in mine], advantages=advantages, value_targets=targets)

    def metrics(self, rollouts: Sequence[ScoredRollout], numbers: Numbers) -> dict[str, float]:
        """Advantages by turn index, and the sizes of step groups."""
        by_index: dict[int, list[float]] = {}
        for rollout, turns in zip(rollouts, numbers, strict=True):
            if rollout.counts:
                for k, entry in enumerate(turns):
                    values = entry if isinstance(entry, Sequence) else [entry]
                    by_index.setdefault(k, []).extend(cast("Sequence[float]", values))
        metrics: dict[str, float] = {}
        for k, values in by_index.items():
            metrics[f"advantage/turn_{k:02d}"] = fmean(values) if values else 0.0
            metrics[f"advantage_std/turn_{k:02d}"] = stdev(values) if len(values) > 1 else 0.0
        if sizes := step_group_sizes(rollouts):
            metrics["step_groups/mean_size"] = fmean(sizes)
            metrics["step_groups/max_size"] = float(max(sizes))
            metrics["step_groups/singletons"] = sizes.count(1) / sum(sizes)
        return metrics

    def _weights(
        self, rollouts: Sequence[ScoredRollout], trajectories: Sequence[Trajectory]
    ) -> list[list[list[float]]]:
        """The weights that the settings put on each turn, each as (B, K); empty where they put none."""
        args, found = self._args, list[list[list[float]]]()
        if args.loss_aggregation is not None:
            found.append(
                aggregation_weights(
                    [token_counts(trajectory) for trajectory in trajectories],
                    [rollout.group for rollout in rollouts],
                    [rollout.counts for rollout in rollouts],
                    args.loss_aggregation,
                    constant=args.max_completion_length,
                )
            )
        if args.invalid_turns != "keep":
            invalid = [[turn.invalid for turn in trajectory.turns] for trajectory in trajectories]
            found.append(invalid_turn_weights(invalid, args.invalid_turns))
        return found

    def _on_tokens(
        self, trajectory: Trajectory, numbers: Sequence[Any], weights: Sequence[Sequence[float]]
    ) -> list[float]:
        advantages = token_advantages(trajectory, numbers, estimator=self.estimator)
        for weight in weights:
            factors = place_on_tokens(trajectory, weight, "each")
            advantages = [advantage * factor for advantage, factor in zip(advantages, factors, strict=True)]
        return advantages

    def _value_targets(self, rollouts: Sequence[ScoredRollout]) -> list[list[list[float]]]:
        args, estimator = self._args, self.estimator
        if isinstance(estimator, PotentialShaping):  # values are of what the estimator sees
            rollouts = shaped(rollouts, discount=args.discount, weight=estimator.weight)
        if estimator.function in CRITICS:
            return targets_of(estimator.function, rollouts, discount=args.discount, **estimator.options)
        return targets_of(turn_gae, rollouts, discount=args.discount, trace_decay=1.0)  # one's own: the plain return

    def _warn_of(self, rollouts: Sequence[ScoredRollout], trajectories: Sequence[Trajectory]) -> None:
        """Say once what about the settings does not fit what was played."""
        counted = [rollout for rollout in rollouts if rollout.counts]
        if not counted:
            return
        self._warn_of_states(counted)
        self._warn_of_rewards(counted)
        if compares_in_task_groups(self.estimator) and 1 in Counter(rollout.group for rollout in counted).values():
            self._warn_once(
                "a task group has one rollout that counts, which %r has nothing to hold against: min_group_size=2 "
                "leaves such groups out",
                self.estimator.name,
            )
        length = fmean([sum(token_counts(row)) for row in trajectories])
        if length == 0:
            self._warn_once("no rollout of the generation batch has an agent token, so that there is nothing to learn")
        if length > _LONG_ROLLOUT:
            self._warn_of_length(math.floor(length))

    def _warn_of_states(self, rollouts: Sequence[ScoredRollout]) -> None:
        if self.estimator.function is not gigpo:
            return
        keys = [key for rollout in rollouts for key in rollout.state_keys]
        sizes = step_group_sizes(rollouts)
        if keys and all(key is None for key in keys):
            self._warn_once(
                "the game gives no state keys, so that gigpo is without its second term: write its _state_key"
            )
        if sizes and sizes.count(1) > 0.9 * sum(sizes):
            self._warn_once(
                "more than nine in ten turns are alone in their state, so that gigpo has nothing to hold them against: "
                "_state_key is too fine for %d rollouts a task",
                cast("int", self._args.num_generations),
            )

    def _warn_of_rewards(self, rollouts: Sequence[ScoredRollout]) -> None:
        args, num_rollouts, function = self._args, cast("int", self._args.num_generations), self.estimator.function
        is_by_group = args.scale_rewards == "group" and compares_in_task_groups(self.estimator)
        if is_by_group and num_rollouts < _SMALL_GROUP and _are_sparse(rollouts):
            self._warn_once(
                "scale_rewards='group' with %d rollouts a task and one paid turn at most: where wins are rare the "
                "gradient can point the wrong way, under 'batch' too if a batch has few task groups; 'none' keeps its "
                "direction",
                num_rollouts,
            )
        if function in OF_RETURNS and any(map(_is_paid_elsewhere, rollouts)):
            self._warn_once(
                "the final reward is not what the turns were paid together, and %r sums what turns are paid: pay it in "
                "_step_episode, or set env_config['turn_credit'] to 'final'",
                self.estimator.name,
            )
        if function in UNDISCOUNTED and args.discount != 1 and not isinstance(self.estimator, PotentialShaping):
            self._warn_once("discount=%g does nothing: %r has no sum over turns", args.discount, self.estimator.name)

    def _warn_of_length(self, length: int) -> None:
        args, lags_behind = self._args, _trl.needs_old_logprobs(self._args)
        mode, *_ = correction_of(args) or ("",)
        if mode.startswith("sequence") or (args.loss_type == "vespo" and lags_behind):
            self._warn_once(
                "importance ratios that multiply those of all tokens of a row, %d agent tokens on average: small "
                "differences add up, so that most rows end at a bound or at 0; use ratios of single tokens",
                length,
            )
        if args.importance_sampling_level == "sequence" and lags_behind:
            self._warn_once(
                "importance_sampling_level='sequence' clips a mean over %d agent tokens on average, which hardly ever "
                "leaves the bounds that suit single tokens: its authors set epsilon=3e-4 and epsilon_high=4e-4",
                length,
            )

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)


def _are_sparse(rollouts: Sequence[ScoredRollout]) -> bool:
    return all(sum(reward != 0 for reward in rollout.turn_rewards) <= 1 for rollout in rollouts)


def _laid(trajectory: Trajectory, targets: Sequence[Sequence[float]]) -> list[float]:
    laid = [math.nan] * len(trajectory.token_ids)
    for turn, own in zip(trajectory.turns, targets, strict=True):
        laid[turn.start : turn.stop] = own
    return laid


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


def _is_paid_elsewhere(rollout: ScoredRollout) -> bool:
    paid = math.fsum(rollout.turn_rewards)
    return bool(rollout.turn_rewards) and not math.isclose(paid, rollout.final_reward, rel_tol=1e-6, abs_tol=1e-6)
