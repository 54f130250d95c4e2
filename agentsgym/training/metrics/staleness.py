"""Measure the age of the weights that sampled a batch, in updates: generation batches trained on since then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from agentsgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSums:
    """Sums over the turns of one rank, from which :func:`staleness_metrics` computes the metrics over all ranks.

    Attributes:
        num_turns: Number of turns whose policy version is known.
        total: Sum of the ages of these turns, in updates.
        oldest: The largest age; 0 without turns.
        num_rollouts: Number of rollouts with such turns.
        num_mixed: Number of these rollouts whose turns were sampled by more than one version.
        waited_s: Seconds that the rank waited for the batch.
    """

    num_turns: int
    total: int
    oldest: int
    num_rollouts: int
    num_mixed: int
    waited_s: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], age: Callable[[int], int], waited_s: float) -> Self:
        """Sum over the turns of rollouts.

        Args:
            trajectories: The rollouts of this rank.
            age: Returns the age of a policy version, in updates.
            waited_s: See the attribute.
        """
        versions = [
            [turn.policy_version for turn in one.turns if turn.policy_version is not None] for one in trajectories
        ]
        ages = [age(version) for own in versions for version in own]
        return cls(
            num_turns=len(ages),
            total=sum(ages),
            oldest=max(ages, default=0),
            num_rollouts=sum(bool(own) for own in versions),
            num_mixed=sum(len(set(own)) > 1 for own in versions),
            waited_s=waited_s,
        )


def staleness_metrics(ranks: Sequence[StalenessSums]) -> dict[str, float]:
    """Compute the logged metrics.

    Returns:
        ``staleness/mean`` and ``staleness/max`` over turns, in updates; ``staleness/mixed_rollouts``, the fraction of
        rollouts with several policy versions; ``staleness/wait_s``, the longest wait of any rank in seconds.
    """
    num_turns = max(1, sum(rank.num_turns for rank in ranks))
    num_rollouts = max(1, sum(rank.num_rollouts for rank in ranks))
    return {
        "staleness/mean": sum(rank.total for rank in ranks) / num_turns,
        "staleness/max": float(max(rank.oldest for rank in ranks)),
        "staleness/mixed_rollouts": sum(rank.num_mixed for rank in ranks) / num_rollouts,
        "staleness/wait_s": max(rank.waited_s for rank in ranks),
    }
