"""Record statistics of the loss by turn index and by row, from its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import TrainerCallback

from agentsgym.ranks import all_gather_objects
from agentsgym.training.tensors.importance import effective_sample_size, row_log_ratios

if TYPE_CHECKING:
    from agentsgym.training.tensors.loss_types import LossType

NUM_TURNS: Final = 100  # turn indices in metric names have two digits
ADDED_LOSSES: Final = ("value_loss", "observation_loss", "demonstration_loss")


class LossStatistics:
    """Entropy, importance ratio and clipping by turn index, and the weights of rows, since the last log."""

    def __init__(
        self, loss_type: LossType, *, epsilon_low: float, epsilon_high: float, device: torch.device | str = "cpu"
    ) -> None:
        """Read the clip bounds, and start empty."""
        self._bounds = loss_type.clip_bounds(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
        self._names = ["entropy", "ratio", *([] if self._bounds is None else ["clip_ratio"])]
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Discard the recorded statistics."""
        self._turns = TurnStatistics(self._names, device=self._device)
        self._log_ratios: list[float] = []
        # the sum of each loss beside TRL's, and the number of its terms
        self._means = {name: torch.zeros(2, device=self._device) for name in ADDED_LOSSES}

    def update(
        self, turn_index: torch.Tensor, inputs: Mapping[str, Any], logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> None:
        """Add a micro-batch.

        Args:
            turn_index: (B, T), -1 on all tokens but the agent's.
            inputs: The inputs of the loss.
            logprobs: (B, T), log-probabilities under the model being trained.
            entropies: (B, T).
        """
        logprobs, old = logprobs.detach(), inputs.get("old_per_token_logps")
        log_ratio = torch.zeros_like(logprobs) if old is None else logprobs - old
        values = {"entropy": entropies, "ratio": log_ratio.exp()}
        if self._bounds is not None:
            low, high = self._bounds
            values["clip_ratio"] = clipped(values["ratio"], inputs["advantages"], low=low, high=high)
        self._turns.add(turn_index, **values)
        self._log_ratios += row_log_ratios(log_ratio, inputs["tool_mask"])

    def add_mean(self, name: str, summed_loss: torch.Tensor, num_terms: torch.Tensor) -> None:
        """Add one of :data:`ADDED_LOSSES` on this rank's part of a micro-batch: its sum, 0-dim, and number of terms."""
        self._means[name] += torch.stack([summed_loss.detach(), num_terms]).to(self._means[name])

    def metrics(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the metrics since the last call, over all ranks, and reset. Collective.

        Returns:
            ``{entropy,ratio,clip_ratio}/turn_{k}``, ``effective_sample_size`` and the :data:`ADDED_LOSSES`; empty if
            nothing was recorded.
        """
        log_ratios, self._log_ratios = all_gather_objects(self._log_ratios), []
        means: list[list[float]] = sum_over_ranks(torch.stack([*self._means.values()])).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        metrics = self._turns.metrics(sum_over_ranks)
        for name, (total, count) in zip(self._means, means, strict=True):
            self._means[name].zero_()
            if count:
                metrics[name] = total / count
        return metrics | {"effective_sample_size": effective_sample_size(log_ratios)} if log_ratios else metrics


class TurnStatistics:
    """Sums over agent tokens by turn index, kept on the device: nothing synchronizes before :meth:`metrics`.

    Turns are counted from the start of the rollout. Turns from ``num_turns`` on are skipped: their pooled mean would
    cover turns that have little in common, and few rollouts have that many.
    """

    def __init__(self, names: Sequence[str], num_turns: int = NUM_TURNS, *, device: torch.device | str = "cpu") -> None:
        """Start empty.

        Args:
            names: The quantities to sum, the same on all ranks; without ``"clip_ratio"`` if the loss does not clip.
            num_turns: Number of turns that are recorded; the same on all ranks.
            device: The device of micro-batches.
        """
        self.num_turns, self.names = num_turns, tuple(names)
        # The first row counts tokens; the last column is for tokens that belong to no recorded turn.
        self._sums = torch.zeros(1 + len(self.names), num_turns + 1, device=device)

    def add(self, turn_index: torch.Tensor, **values: torch.Tensor) -> None:
        """Add a micro-batch.

        Args:
            turn_index: (B, T), long: the turn that a token belongs to, -1 on all tokens but the agent's.
            values: For each name (B, T), or (B, 1) for one number per row; detached, and used only on agent tokens.
        """
        is_kept = (turn_index >= 0) & (turn_index < self.num_turns)
        columns = turn_index.where(is_kept, self.num_turns).flatten()  # (B·T,)
        rows = [torch.ones_like(turn_index), *(values[name].detach().expand_as(turn_index) for name in self.names)]
        self._sums.index_add_(1, columns, torch.stack([row.float() for row in rows]).flatten(1))

    def metrics(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the means since the last call, over all ranks, and reset. Collective.

        Args:
            sum_over_ranks: Sums a tensor over all ranks; called once, on every rank with a tensor of the same shape.

        Returns:
            ``{name}/turn_{k:02d}`` for every turn index that has agent tokens on some rank: the names are the same on
            all ranks.
        """
        rows: list[list[float]] = sum_over_ranks(self._sums[:, : self.num_turns].contiguous()).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        counts, *sums = rows
        self._sums.zero_()
        return {
            f"{name}/turn_{k:02d}": own[k] / count
            for k, count in enumerate(counts)
            if count
            for name, own in zip(self.names, sums, strict=True)
        }


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """Mark clipped tokens: above the upper bound with a positive advantage, below the lower with a negative one.

    TRL counts the same in ``clip_ratio/region_mean`` and, with the bounds of ``cispo``, in ``cispo_clip_ratio`` (there
    the ratio is also clipped with a negative advantage, which TRL does not count). As in TRL, ``delta`` is not counted.

    Args:
        ratio: (B, T) or (B, 1), current to old probability.
        advantages: (B, T).
        low: The lower bound from :meth:`LossType.clip_bounds`.
        high: The upper bound from :meth:`LossType.clip_bounds`.

    Returns:
        (B, T), boolean.
    """
    return ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))


class FlushMetrics(TrainerCallback):
    """Calls a function on all ranks when a step or an epoch is about to be logged."""

    def __init__(self, flush: Callable[[], None]) -> None:
        """Set the function, which may be collective."""
        self._flush = flush

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call the function if this step is logged, which transformers' callback has decided by now."""
        if control.should_log:
            self._flush()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call the function if this epoch is logged."""
        self.on_step_end(args, state, control, **kwargs)
