"""Compute the loss of a micro-batch: TRL's loss on the columns with agent tokens, plus the losses of objectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from agentsgym.batch.views import round_up
from agentsgym.ranks import process_state
from agentsgym.training._trl import MicroBatch, TRLInterface
from agentsgym.training.objectives.objective import ForwardPass
from agentsgym.training.tensors.scoring import mask_labels
from agentsgym.training.tensors.shared_prefix import micro_batches
from agentsgym.training.tensors.token_batch import MIN_WIDTH

if TYPE_CHECKING:
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.metrics.loss import LossStatistics
    from agentsgym.training.objectives.objective import Objective

TRLLoss = Callable[[Any, MicroBatch], torch.Tensor]
"""(model, inputs of TRL's loss) → the loss, 0-dim."""


class MicrobatchLoss:
    """The loss of a micro-batch, computed in parts if it has more rows than the settings allow per forward pass.

    The turn layout splits a rollout whose history was rewritten into several rows. The backward passes of all parts but
    the last run here, so that only one part's graph is in memory.
    """

    def __init__(
        self, trl: TRLInterface, args: GRPOEnvConfig, statistics: LossStatistics, objectives: Sequence[Objective]
    ) -> None:
        """Bind the loss to a run.

        Args:
            trl: The interface to TRL's trainer.
            args: The settings.
            statistics: Updated by every training micro-batch.
            objectives: Their losses are added, in this order.
        """
        self._trl = trl
        self._args = args
        self._statistics = statistics
        self._within = [one for one in objectives if one.metric and not one.has_own_pass]
        self._apart = [one for one in objectives if one.has_own_pass]
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
        for one in self._apart if is_training else ():
            self._trl.backward(loss)
            terms = one.own_terms(model)
            self._statistics.add_mean(one.metric, terms.total, terms.count)
            loss = loss.detach() + terms.weighted / terms.count.clamp(min=1) / self._trl.accumulation_steps
        return loss

    def _policy_loss(self, model: Any, batch: MicroBatch, trl_loss: TRLLoss, *, is_training: bool) -> torch.Tensor:
        """Compute the loss on the rows of a generation batch, in parts if there are many. Collective."""
        args = self._args
        if args.layout == "trajectory":
            return self._part_loss(model, batch, trl_loss, is_training=is_training)
        size = args.per_device_train_batch_size if is_training else int(batch["num_rollouts"])
        *before, last = split_rows(batch, size, shares=self._trl.shares_prefixes)
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
        scored: list[torch.Tensor] = [batch[one.scored_column] for one in self._within if one.scored_column]
        labeled = sum(scored, start=mask)  # no token is both an agent's and an observation's
        kept: list[torch.Tensor] = []

        def on_logprobs(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
            kept.append(logprobs)
            if scored:
                logprobs = logprobs.masked_fill(inputs["tool_mask"] == 0, 0.0)
            if self._args.importance_sampling_level == "sequence":
                use_sequence_ratio(inputs, logprobs)
            if is_training:
                self._statistics.update(batch["turn_index"][:, start:stop], inputs, logprobs, entropies)
            return logprobs

        has_tokens = bool(self._trl.sum_over_ranks(mask.sum()))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._trl.intercept_logprobs(on_logprobs))
            for one in self._within:
                stack.enter_context(one.capturing())
            if not has_tokens:
                stack.enter_context(self._trl.muted_metrics(is_training=is_training))
            loss = trl_loss(mask_labels(model, labeled[:, :stop]), inputs)
        forward = ForwardPass(batch=batch, start=start, stop=stop, logprobs=kept[0], is_training=is_training)
        return sum((self._added_loss(one, forward) for one in self._within), start=loss)

    def _added_loss(self, objective: Objective, forward: ForwardPass) -> torch.Tensor:
        """The part of these rows in the mean of an objective's terms over an optimizer step."""
        terms, num_terms = objective.terms(forward), forward.batch[objective.count_column].clamp(min=1)
        if forward.is_training:
            self._statistics.add_mean(objective.metric, terms.total, terms.count)
            # The part of a generation batch in one optimizer step, counted as TRL counts tokens.
            steps = cast("int", self._args.steps_per_generation)  # TRL has filled it in
            num_terms = num_terms * self._trl.accumulation_steps / steps
        return terms.weighted * process_state().num_processes / num_terms


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


def regroup_rows(
    batches: list[MicroBatch], args: GRPOEnvConfig, *, has_aux_loss: bool, shares: bool
) -> list[MicroBatch]:
    """Put rows into micro-batches by :func:`micro_batches`, within the rows of one optimizer step.

    TRL shuffles rows. Gradients of one step are summed, so the micro-batch of a row does not matter, unless the loss
    has a mean or a quantile over the tokens of a micro-batch: ``bnpo``, the entropy bonus, ``top_entropy_quantile``, a
    mixture-of-experts auxiliary loss. Of these, rows are regrouped only with the entropy bonus, and only if the model
    ``shares`` prefixes: its mean is then over the rows of a group rather than over any rows.
    """
    size = len(batches[0]["attention_mask"])
    window = min(args.gradient_accumulation_steps, len(batches))
    has_bonus = (args.entropy_coef != 0 or args.use_adaptive_entropy) and not shares
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
        ordered += [_take_rows(rows, places) for places in micro_batches(rows, size, shares=shares)]
    return ordered


def split_rows(batch: Mapping[str, Any], size: int, *, shares: bool) -> list[MicroBatch]:
    """Split a micro-batch into parts of at most ``size`` rows, by :func:`micro_batches`."""
    num_rows = len(batch["attention_mask"])
    if num_rows <= size:
        return [dict(batch)]
    return [_take_rows(batch, places) for places in micro_batches(batch, size, shares=shares)]


def _take_rows(batch: Mapping[str, Any], places: torch.Tensor) -> MicroBatch:
    return {key: value[places] if torch.is_tensor(value) and value.dim() else value for key, value in batch.items()}
