"""Generation batches: their purpose and number before they are played, and their rollouts afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from agentsgym.batch.layouts import TrainingRow
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.envs.dataset_rows import DatasetRow
    from agentsgym.training.metrics.rollouts import RolloutSummary
    from agentsgym.types import Trajectory


class PlayedEvaluation:
    """The generation batches of one evaluation: the summaries of all ranks, and this rank's trajectories.

    Attributes:
        num_rollouts: Number of rollouts on all ranks so far.
    """

    def __init__(self) -> None:
        self._batches: list[GenerationBatch] = []
        self.num_rollouts = 0

    def add(self, batch: GenerationBatch) -> None:
        """Add the next batch."""
        self._batches.append(batch)
        self.num_rollouts += len(batch.rollouts)

    def first(self, count: int | None) -> tuple[list[RolloutSummary], list[Trajectory]]:
        """Return the first ``count`` rollouts of all ranks (None: all), and this rank's trajectories among them."""
        outcomes: list[RolloutSummary] = []
        own: list[Trajectory] = []
        start = 0
        count = self.num_rollouts if count is None else count
        for batch in self._batches:
            outcomes += batch.rollouts
            own += [one for i, one in zip(batch.local_indices, batch.trajectories, strict=True) if start + i < count]
            start += len(batch.rollouts)
        return outcomes[:count], own


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The purpose and the number of a generation batch.

    Attributes:
        kind: ``"train"`` or ``"eval"``.
        index: In training, the number of the generation batch, from 1; in an evaluation, the number of rollouts played
            before it. Seeds are derived from kind and index, so that a resumed run uses the same ones.
        step: Number of optimizer steps taken so far.
        num_rollouts: Number of consecutive rows that are rollouts of one task.
        attempt: 0 for the batch itself, k for the k-th resampling of its task groups.
    """

    kind: Literal["train", "eval"]
    index: int
    step: int
    num_rollouts: int
    attempt: int = 0

    @property
    def is_training(self) -> bool:
        """Whether the batch is trained on."""
        return self.kind == "train"

    def place(self, index: int) -> tuple[int, int]:
        """Return a row's task group and its index in the group, given the row's index over all ranks.

        Task groups are numbered per batch in training, and over all batches in an evaluation.
        """
        return divmod(index if self.is_training else self.index + index, self.num_rollouts)

    @property
    def seed_parts(self) -> tuple[str | int, ...]:
        """The values from which this batch's seeds are derived, together with ``args.seed``."""
        return (self.kind, self.index, *(("again", self.attempt) if self.attempt else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch:
    """A generation batch that has been played.

    Attributes:
        dataset_rows: The rows of this rank's rollouts, (B,).
        trajectories: This rank's rollouts, (B,).
        training_rows: The training rows made from these rollouts.
        first: Index of this rank's first rollout in ``rollouts``.
        rollouts: The rollouts of all ranks, in rank order, (N,).
        replaced: Rollouts of all ranks that were played but replaced by resampling.
        metrics: Additional metrics of the generation.
    """

    dataset_rows: Sequence[DatasetRow]
    trajectories: Sequence[Trajectory]
    training_rows: Sequence[TrainingRow]
    first: int
    rollouts: Sequence[RolloutSummary]
    replaced: Sequence[RolloutSummary] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def local_indices(self) -> range:
        """The indices of this rank's rollouts in ``rollouts``."""
        return range(self.first, self.first + len(self.trajectories))

    @property
    def scored(self) -> list[ScoredRollout]:
        """The rollouts of all ranks, as inputs to advantage estimators, (N,)."""
        return [rollout.scored for rollout in self.rollouts]

    @property
    def max_rows(self) -> int:
        """The number of training rows on the rank that has the most."""
        size = max(1, len(self.trajectories))  # equal on all ranks
        ranks = [self.rollouts[start : start + size] for start in range(0, len(self.rollouts), size)]
        counts = [sum(rollout.num_rows for rollout in rank) for rank in ranks]
        return max(counts, default=0)
