"""The loss of a micro-batch: TRL's own, on the columns that matter, and the value head's beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from agentsgym.training import _trl
from agentsgym.training.batches import round_up

if TYPE_CHECKING:
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.training.value_head import ValueModel

Loss = Callable[[Any, dict[str, Any]], torch.Tensor]
"""(model, what TRL's loss reads) → the loss, 0-dim."""


def loss_in_parts(trainer: GRPOEnvTrainer, model: Any, batch: dict[str, Any], compute: Loss) -> torch.Tensor:
    """The loss of a micro-batch, in parts where it has more rows than the settings allow at once.

    A layout makes several rows of a rollout whose history was rewritten. Parts before the last go backward here, so
    that memory is that of one part.

    Args:
        trainer: Whose settings, value head and statistics they are.
        model: As ``Trainer`` gives it.
        batch: Rows of a generation batch.
        compute: TRL's loss.

    Returns:
        0-dim; its gradient is that of the last part.
    """
    args, is_training = trainer.args, _trl.is_training(trainer)
    if args.layout == "trajectory":
        return _loss_of_part(trainer, model, batch, compute)
    size = args.per_device_train_batch_size if is_training else int(batch["num_rollouts"])
    *before, last = _trl.in_parts(batch, size)
    done: list[torch.Tensor] = []
    for part in before:
        loss = _loss_of_part(trainer, model, part, compute)
        if is_training:
            trainer.accelerator.backward(loss)
        done.append(loss.detach())
    return sum(done, start=_loss_of_part(trainer, model, last, compute))


def _loss_of_part(trainer: GRPOEnvTrainer, model: Any, batch: dict[str, Any], compute: Loss) -> torch.Tensor:
    mask = batch["agent_token_mask"]
    last = round_up(max(3, int(batch["attention_mask"].sum(1).max())), int(trainer.args.pad_to_multiple_of or 1))
    columns = mask.any(0).nonzero()
    # Never one column alone, which TRL's metrics would take for one number a row.
    first = max(1, min(int(columns[0]), last - 2)) if len(columns) else last - 2
    narrowed = _trl.loss_inputs(batch, first, last)

    def look(logps: torch.Tensor, entropies: torch.Tensor) -> None:
        if trainer.args.importance_sampling_level == "sequence":
            _trl.use_sequence_ratio(narrowed, logps)
        if _trl.is_training(trainer):
            trainer.statistics.observe(batch["turn_index"][:, first:last], narrowed, logps, entropies)

    value_model = trainer.value_model
    observing = contextlib.nullcontext() if value_model is None else value_model.observing()
    has_tokens = bool(_trl.total(trainer, mask.sum()))
    told = contextlib.nullcontext() if has_tokens else _trl.unrecorded(trainer)
    with _trl.scored_by_loss(trainer, look), observing, told:
        loss = compute(_trl.only_labelled(model, mask[:, :last]), narrowed)
    return loss if value_model is None else loss + _value_loss(trainer, batch, last)


def _value_loss(trainer: GRPOEnvTrainer, batch: dict[str, Any], last: int) -> torch.Tensor:
    """The value head's, a mean over the targets of an optimizer step as TRL counts the tokens of one."""
    value_model, num_targets = cast("ValueModel", trainer.value_model), batch["num_value_targets"].clamp(min=1)
    is_training = _trl.is_training(trainer)
    value_model.train(is_training)
    if is_training:
        num_targets = num_targets * _trl.accumulation_steps(trainer) / cast("int", trainer.args.steps_per_generation)
    ids, attention_mask, targets = (
        batch[name][:, :last] for name in ("prompt_completion_ids", "attention_mask", "value_targets")
    )
    loss = value_model.loss(ids, attention_mask, targets, num_targets)
    if is_training:
        summed = loss * num_targets / trainer.accelerator.num_processes
        trainer.statistics.observe_values(summed, targets.isfinite().sum())
    return loss
