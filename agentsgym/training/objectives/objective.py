"""The one path of what the policy learns from in addition to its advantages, through the batch and the loss.

::

    ObservedBatch ─▶ advantages ─▶ × mask × weights ─▶ added to the estimator's
                  ╰▶ columns ─▶ micro-batch ─▶ forward pass ─▶ Terms ─▶ Σ weight · term / (terms of the step) ─▶ loss

Masks and weights are those of the policy's loss. Nothing is learned from a rollout that a filter excludes, or from a
turn that ``invalid_turns`` excludes and the observation after it; and ``loss_aggregation`` names the unit that a mean
over a batch is of. The value head is an exception, since excluded turns stay in the baselines: its mean is over all
targets.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import TrainerCallback

if TYPE_CHECKING:
    import torch

    from agentsgym.training._trl import MicroBatch
    from agentsgym.training.observing import ObservedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """The policy's forward pass over some rows of a micro-batch.

    Attributes:
        batch: The rows.
        start: The first column whose tokens the loss predicts.
        stop: The end of the columns.
        logprobs: (B, stop - start), attached to their graph; 0.0 on tokens that nothing is learned from.
        is_training: Whether a gradient is needed.
    """

    batch: MicroBatch
    start: int
    stop: int
    logprobs: torch.Tensor
    is_training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of an objective on some rows of this rank.

    Attributes:
        weighted: Σ weight · term, 0-dim, attached to its graph.
        total: The sum that is logged, 0-dim.
        count: The number of terms, 0-dim.
    """

    weighted: torch.Tensor
    total: torch.Tensor
    count: torch.Tensor


class Objective(TrainerCallback):
    """What the policy, or a head on it, learns in addition to the advantages; a callback of the trainer as well.

    Attributes:
        metric: The name under which the mean of the terms is logged; empty without terms.
        has_own_pass: Whether the terms come from a forward pass of its own for each micro-batch, :meth:`own_terms`.
        count_column: The column with the number of terms of a generation batch, over all ranks.
        scored_column: The column that is not 0 on the tokens, other than the agent's, whose log-probabilities it needs;
            empty if it needs none.
    """

    metric: ClassVar[str] = ""
    has_own_pass: ClassVar[bool] = False
    count_column: ClassVar[str] = ""
    scored_column: ClassVar[str] = ""

    def advantages(self, batch: ObservedBatch) -> torch.Tensor | None:
        """Return what is added to the advantages, before masks and weights, (B, L); None for nothing. Collective."""

    def columns(self, batch: ObservedBatch) -> dict[str, torch.Tensor]:
        """Return what the loss needs of a generation batch: (B, L) each, and numbers over all ranks. Collective."""
        return {}

    def capturing(self) -> AbstractContextManager[None]:
        """Observe the policy's forward pass inside."""
        return nullcontext()

    def terms(self, forward: ForwardPass) -> Terms:
        """Return the terms on the rows of the policy's forward pass. Collective."""
        raise NotImplementedError

    def own_terms(self, model: Any) -> Terms:
        """Return the terms of a micro-batch from an additional forward pass. Collective."""
        raise NotImplementedError
