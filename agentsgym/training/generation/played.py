"""Collect the generation batches of one evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentsgym.training.generation.batch import GenerationBatch
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
            own += [one for i, one in zip(batch.mine, batch.trajectories, strict=True) if start + i < count]
            start += len(batch.rollouts)
        return outcomes[:count], own
