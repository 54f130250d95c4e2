"""Compute the loss of a micro-batch: TRL's loss on the columns with agent tokens, plus other losses on its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from agentsgym.batch.padding import round_up
from agentsgym.training._trl import MicroBatch, TRLInterface
from agentsgym.training.tensors.labels import mask_labels
from agentsgym.training.tensors.token_batch import MIN_WIDTH

if TYPE_CHECKING:
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.metrics.loss import LossStatistics
    from agentsgym.training.objectives.demonstrations import DemonstrationLoss
    from agentsgym.training.objectives.value_head import ValueModel

TRLLoss = Callable[[Any, MicroBatch], torch.Tensor]
"""(model, inputs of TRL's loss) → the loss, 0-dim."""


class MicrobatchLoss:
    """The loss of a micro-batch, computed in parts if it has more rows than the settings allow per forward pass.

    The turn layout splits a rollout whose history was rewritten into several rows. The backward passes of all parts but
    the last run here, so that only one part's graph is in memory.
    """

    def __init__(
        self,
        trl: TRLInterface,
        args: GRPOEnvConfig,
        statistics: LossStatistics,
        value_model: ValueModel | None,
        demonstrations: DemonstrationLoss | None,
    ) -> None:
        """Bind the loss to a run.

        Args:
            trl: The interface to TRL's trainer.
            args: The settings.
            statistics: Updated by every training micro-batch.
            value_model: The value head, whose loss is added; None without one.
            demonstrations: The loss on demonstrations, which is added in training; None without one.
        """
        self._trl = trl
        self._args = args
        self._statistics = statistics
        self._value_model = value_model
        self._demonstrations = demonstrations
        self._width_multiple = int(args.pad_to_multiple_of or 1)

    def __call__(self, model: Any, batch: MicroBatch, trl_loss: TRLLoss, *, is_training: bool) -> torch.Tensor:
        """Compute the loss. Collective.

        Args:
            model: The model, as ``Trainer`` passes it.
            batch: Rows of a generation batch.
            trl_loss: TRL's loss.
            is_training: Whether a gradient is needed.

        Returns:
            The loss, 0-dim; only the last part is still attached to its graph.
        """
        loss = self._policy_loss(model, batch, trl_loss, is_training=is_training)
        if self._demonstrations is None or not is_training:
            return loss
        self._trl.backward(loss)
        return loss.detach() + self._demonstration_loss(self._demonstrations, model)

    def _demonstration_loss(self, demonstrations: DemonstrationLoss, model: Any) -> torch.Tensor:
        """The weighted mean of -log p over the demonstrations of a micro-batch."""
        summed, num_tokens = demonstrations(model)
        self._statistics.add_mean("demonstration_loss", summed.detach(), num_tokens)
        return demonstrations.weight * summed / num_tokens.clamp(min=1) / self._trl.accumulation_steps

    def _policy_loss(self, model: Any, batch: MicroBatch, trl_loss: TRLLoss, *, is_training: bool) -> torch.Tensor:
        """Compute the loss on the rows of a generation batch, in parts if there are many. Collective."""
        args = self._args
        if args.layout == "trajectory":
            return self._part_loss(model, batch, trl_loss, is_training=is_training)
        size = args.per_device_train_batch_size if is_training else int(batch["num_rollouts"])
        *before, last = split_rows(batch, size)
        part_losses: list[torch.Tensor] = []
        for part in before:
            loss = self._part_loss(model, part, trl_loss, is_training=is_training)
            if is_training:
                self._trl.backward(loss)
            part_losses.append(loss.detach())
        return sum(part_losses, start=self._part_loss(model, last, trl_loss, is_training=is_training))

    def _part_loss(self, model: Any, batch: MicroBatch, trl_loss: TRLLoss, *, is_training: bool) -> torch.Tensor:
        """Compute the loss of rows that fit in one forward pass. Collective."""
        mask = batch["agent_token_mask"]
        stop = round_up(max(MIN_WIDTH, int(batch["attention_mask"].sum(1).max())), self._width_multiple)
        columns = mask.any(0).nonzero()
        # At least two columns: TRL's metrics would interpret a single column as one value per row.
        start = max(1, min(int(columns[0]), stop - 2)) if len(columns) else stop - 2
        inputs = loss_inputs(batch, start, stop)
        weights: torch.Tensor | None = batch.get("observation_weights")
        labeled = mask if weights is None else mask + weights  # no token has both
        scored: list[torch.Tensor] = []

        def on_logprobs(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
            if weights is not None:
                scored.append(logprobs)
                logprobs = logprobs.masked_fill(inputs["tool_mask"] == 0, 0.0)
            if self._args.importance_sampling_level == "sequence":
                use_sequence_ratio(inputs, logprobs)
            if is_training:
                self._statistics.update(batch["turn_index"][:, start:stop], inputs, logprobs, entropies)
            return logprobs

        value_model = self._value_model
        capturing = contextlib.nullcontext() if value_model is None else value_model.capture_hidden_states()
        has_tokens = bool(self._trl.sum_over_ranks(mask.sum()))
        muting = contextlib.nullcontext() if has_tokens else self._trl.muted_metrics(is_training=is_training)
        with self._trl.intercept_logprobs(on_logprobs), capturing, muting:
            loss = trl_loss(mask_labels(model, labeled[:, :stop]), inputs)
        if weights is not None:
            loss = loss + self._observation_loss(batch, weights[:, start:stop], scored[0], is_training=is_training)
        return loss if value_model is None else loss + self._value_loss(batch, stop, is_training=is_training)

    def _observation_loss(
        self, batch: MicroBatch, weights: torch.Tensor, logprobs: torch.Tensor, *, is_training: bool
    ) -> torch.Tensor:
        """The weighted mean of -log p over the observation tokens of an optimizer step."""
        num_tokens = self._per_step(batch["num_observation_tokens"], is_training=is_training)
        if is_training:
            is_weighted = weights > 0
            self._statistics.add_mean("observation_loss", -logprobs[is_weighted].sum(), is_weighted.sum())
        return -(weights * logprobs).sum() * self._trl.num_ranks / num_tokens

    def _per_step(self, num_tokens: torch.Tensor, *, is_training: bool) -> torch.Tensor:
        """The part of a generation batch's number of tokens in one optimizer step, counted as TRL counts tokens."""
        num_tokens = num_tokens.clamp(min=1)
        if not is_training:
            return num_tokens
        steps = cast("int", self._args.steps_per_generation)  # TRL has filled it in
        return num_tokens * self._trl.accumulation_steps / steps

    def _value_loss(self, batch: MicroBatch, stop: int, *, is_training: bool) -> torch.Tensor:
        """The value head's loss: a mean over the targets of an optimizer step."""
        value_model = cast("ValueModel", self._value_model)
        num_targets = self._per_step(batch["num_value_targets"], is_training=is_training)
        value_model.train(is_training)
        ids, attention_mask, targets = (
            batch[name][:, :stop] for name in ("prompt_completion_ids", "attention_mask", "value_targets")
        )
        loss = value_model.loss(ids, attention_mask, targets, num_targets)
        if is_training:
            summed = loss * num_targets / self._trl.num_ranks
            self._statistics.add_mean("value_loss", summed, targets.isfinite().sum())
        return loss


def loss_inputs(batch: Mapping[str, Any], start: int, stop: int) -> MicroBatch:
    """Truncate rows to the columns [0, stop), under the names in TRL's loss: prompt [0, start) and completion."""
    ids, attention_mask = batch["prompt_completion_ids"], batch["attention_mask"]
    inputs: MicroBatch = {
        "prompt_ids": ids[:, :start],
        "prompt_mask": attention_mask[:, :start],
        "completion_ids": ids[:, start:stop],
        "completion_mask": attention_mask[:, start:stop],
        "tool_mask": batch["agent_token_mask"][:, start:stop],
        "advantages": batch["advantages"][:, start:stop],
        "num_items_in_batch": batch["num_items_in_batch"],
    }
    for key in ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"):
        if batch.get(key) is not None:
            inputs[key] = batch[key][:, start:stop]
    return inputs


def use_sequence_ratio(inputs: MicroBatch, logprobs: torch.Tensor) -> None:
    """Turn TRL's token-level ratio into the row's ratio, with a separate gradient per token (GSPO, 2507.18071).

    Every token's ratio becomes ``s = exp(mean_t (logp_t - old_t))``, over the row's agent tokens t, with the gradient
    ``s·∇logp_t``. Without old log-probabilities the ratio is 1 anyway. TRL's sequence level is unsuitable: it averages
    the advantages of a row.

    Args:
        inputs: From :func:`loss_inputs`; changed in place.
        logprobs: (B, T), attached to their graph.
    """
    old = inputs.get("old_per_token_logps")
    if old is None:
        return
    mask = inputs["tool_mask"] * inputs["completion_mask"]
    log_ratio = ((logprobs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    inputs["old_per_token_logps"] = (logprobs - log_ratio).detach()


def row_sum(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum each row's advantages, (B, 1); TRL's sequence-level rules depend on the sign of this sum."""
    return (advantages * mask).sum(1, keepdim=True)


def sort_by_length(batches: list[MicroBatch], args: GRPOEnvConfig, *, has_aux_loss: bool) -> list[MicroBatch]:
    """Put rows of similar length into the same micro-batch, within the rows of one optimizer step.

    TRL shuffles rows, so a micro-batch is as wide as the longest row that happens to be in it. Gradients of one step
    are summed, so the micro-batch of a row does not matter, unless the loss has a mean or a quantile over the tokens
    of a micro-batch: ``bnpo``, the entropy bonus, ``top_entropy_quantile``, a mixture-of-experts auxiliary loss.
    """
    size = len(batches[0]["attention_mask"])
    window = min(args.gradient_accumulation_steps, len(batches))
    has_bonus = args.entropy_coef != 0 or args.use_adaptive_entropy
    is_mean_of_microbatch = (
        args.loss.mean_over == "tokens_of_microbatch" or has_bonus or args.top_entropy_quantile < 1 or has_aux_loss
    )
    splits_a_step = len(batches) % window or args.gradient_accumulation_steps % window
    if window == 1 or splits_a_step or is_mean_of_microbatch:
        return batches
    ordered: list[MicroBatch] = []
    for start in range(0, len(batches), window):
        rows = dict(batches[start])
        for key, value in rows.items():
            if torch.is_tensor(value) and value.dim():
                rows[key] = torch.cat([batch[key] for batch in batches[start : start + window]])
        order = rows["attention_mask"].sum(1).argsort(descending=True, stable=True)
        ordered += [_take_rows(rows, places) for places in order.split(size)]
    return ordered


def split_rows(batch: Mapping[str, Any], size: int) -> list[MicroBatch]:
    """Split a micro-batch into parts of at most ``size`` rows, with rows of similar length together."""
    num_rows = len(batch["attention_mask"])
    if num_rows <= size:
        return [dict(batch)]
    order = batch["attention_mask"].sum(1).argsort(descending=True, stable=True)
    return [_take_rows(batch, places) for places in order.split(size)]


def _take_rows(batch: Mapping[str, Any], places: torch.Tensor) -> MicroBatch:
    return {key: value[places] if torch.is_tensor(value) and value.dim() else value for key, value in batch.items()}
