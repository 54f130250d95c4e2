"""Describe generation batches, and hold their rollouts once they are played."""

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
        num_rollouts: Rollouts of all ranks so far.
    """

    def __init__(self) -> None:
        self._batches: list[GenerationBatch] = []
        self.num_rollouts = 0

    def add(self, batch: GenerationBatch) -> None:
        """Add the next batch."""
        self._batches.append(batch)
        self.num_rollouts += len(batch.rollouts)

    def first(self, count: int | None) -> tuple[list[RolloutSummary], list[Trajectory]]:
        """Return the first rollouts of all ranks, all for None, and the trajectories of those that this rank played."""
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
        index: Its number among those of its kind: generation batches from 1 on in training, rollouts played before
            it in an evaluation. Its seeds follow from kind and index, also after a resume.
        step: Optimizer steps that are done.
        num_rollouts: Number of consecutive rows that are rollouts of one task.
        attempt: 0 for the batch itself, k when its task groups are resampled for the k-th time.
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
        """Return the task group of a row and its index in there, by the row's index among those of all ranks.

        A training batch counts its task groups from 0, an evaluation those of all its batches.
        """
        return divmod(index if self.is_training else self.index + index, self.num_rollouts)

    @property
    def seed_parts(self) -> tuple[str | int, ...]:
        """The values that seeds of this batch are derived from, together with ``args.seed``."""
        return (self.kind, self.index, *(("again", self.attempt) if self.attempt else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch:
    """A generation batch that has been played.

    Attributes:
        dataset_rows: The rows of this rank's rollouts, (B,).
        trajectories: This rank's rollouts, (B,).
        training_rows: Their layout.
        first: Index of this rank's first rollout among those of all ranks.
        rollouts: The rollouts of all ranks, in rank order, (N,).
        replaced: Rollouts of all ranks that were played and then replaced by others.
        metrics: Further metrics of how it was played.
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
        """The rollouts of all ranks as estimators see them, (N,)."""
        return [rollout.scored for rollout in self.rollouts]

    @property
    def num_trained_tokens(self) -> list[int]:
        """Agent tokens of each rollout that can be trained on, (N,)."""
        return [rollout.num_trained_tokens for rollout in self.rollouts]

    @property
    def max_rows(self) -> int:
        """Training rows of the rank that has the most."""
        size = max(1, len(self.trajectories))  # equal on all ranks
        ranks = [self.rollouts[start : start + size] for start in range(0, len(self.rollouts), size)]
        return max((sum(rollout.num_rows for rollout in rank) for rank in ranks), default=0)
