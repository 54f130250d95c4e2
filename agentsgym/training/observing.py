"""What is told of a loss by turn index and by row, taken from its own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from agentsgym.training.correction import effective_sample_size, row_log_ratios
from agentsgym.training.ranks import gathered
from agentsgym.training.turn_statistics import TurnStatistics, clip_bounds, clipped

if TYPE_CHECKING:
    from agentsgym.training.trainer import GRPOEnvTrainer


class LossStatistics:
    """Entropy, importance ratio and clip by turn index, and what the rows are worth, since the last time."""

    def __init__(self, trainer: GRPOEnvTrainer) -> None:
        """Take what cuts the ratio."""
        self._bounds = clip_bounds(
            trainer.args.loss_type, epsilon_low=trainer.epsilon_low, epsilon_high=trainer.epsilon_high
        )
        names = ["entropy", "ratio", *([] if self._bounds is None else ["clip_ratio"])]
        self._turns = TurnStatistics(names=names, device=trainer.accelerator.device)
        self._log_ratios: list[float] = []
        self._value_loss = torch.zeros(2, device=trainer.accelerator.device)  # its sum, and of how many targets

    def observe(
        self, turn_index: torch.Tensor, inputs: Mapping[str, Any], logps: torch.Tensor, entropies: torch.Tensor
    ) -> None:
        """Take a micro-batch.

        Args:
            turn_index: (B, T), -1 off agent tokens.
            inputs: What the loss is given.
            logps: (B, T), log-probabilities by the weights that are being trained.
            entropies: (B, T).
        """
        logps, old = logps.detach(), inputs.get("old_per_token_logps")
        log_ratio = torch.zeros_like(logps) if old is None else logps - old
        values = {"entropy": entropies, "ratio": log_ratio.exp()}
        if self._bounds is not None:
            low, high = self._bounds
            values["clip_ratio"] = clipped(values["ratio"], inputs["advantages"], low=low, high=high)
        self._turns.add(turn_index, **values)
        self._log_ratios += row_log_ratios(log_ratio, inputs["tool_mask"])

    def observe_values(self, summed_loss: torch.Tensor, num_targets: torch.Tensor) -> None:
        """Take what the value head lost on this rank's part of a micro-batch, 0-dim, and on how many targets."""
        self._value_loss += torch.stack([summed_loss.detach(), num_targets]).to(self._value_loss)

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Over all ranks, on all ranks together; starts anew.

        Args:
            total: The sum of a tensor over all ranks.

        Returns:
            ``{entropy,ratio,clip_ratio}/turn_{k}``, ``effective_sample_size`` and ``value_loss``; empty if nothing was
            observed.
        """
        log_ratios, self._log_ratios = gathered(self._log_ratios), []
        value_loss, num_targets = total(self._value_loss).tolist()
        self._value_loss.zero_()
        metrics = self._turns.metrics(total)
        if num_targets:
            metrics["value_loss"] = value_loss / num_targets
        return metrics | {"effective_sample_size": effective_sample_size(log_ratios)} if log_ratios else metrics


class BeforeLogs(TrainerCallback):
    """Calls a function on all ranks when a step or an epoch is about to be logged."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        """Take the function."""
        self._prepare = prepare

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is logged has been decided by now: transformers' own callback goes first."""
        if control.should_log:
            self._prepare()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Likewise."""
        self.on_step_end(args, state, control, **kwargs)
