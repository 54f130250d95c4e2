"""Train under DeepSpeed ZeRO, whose engine takes the optimizer steps, and at stage 3 holds the weights in pieces."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from trl.models import unwrap_model_for_generation

from agentsgym.agents.eval_mode import evaluation_mode
from agentsgym.agents.policy.sharded import zero_stage

if TYPE_CHECKING:
    from accelerate import Accelerator


def backward_of_part(accelerator: Accelerator, loss: torch.Tensor) -> None:
    """Add the gradient of a part of a micro-batch whose last part transformers goes backward through.

    DeepSpeed's engine would take an optimizer step after any backward pass of the micro-batch that completes the
    gradients, and divide the loss by the accumulation steps, which TRL's loss has been already.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        accelerator.backward(loss)
        return
    completes = accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        accelerator.backward(loss, scale_wrt_gas=False)
    finally:
        accelerator.gradient_state._set_sync_gradients(completes)


def has_skipped_step(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed's engine has just left out an optimizer step, without a word, as gradients were not finite.

    With ``fp16`` it is how its loss scale is found, as a ``GradScaler`` finds it, and no skipped step.
    """
    engine: Any = accelerator.deepspeed_engine_wrapped.engine  # pyright: ignore[reportOptionalMemberAccess]
    return not (engine.was_step_applied() or engine.fp16_enabled())


@contextlib.contextmanager
def whole_weights(model: Any, accelerator: Accelerator, checkpointing: Mapping[str, Any] | None) -> Generator[None]:
    """Collective: hold all weights on every rank inside, where they are in pieces outside.

    Args:
        model: DeepSpeed's engine, stage 3.
        accelerator: Its accelerator.
        checkpointing: The options of gradient checkpointing, which is off meanwhile.
    """
    options = None if checkpointing is None else dict(checkpointing)
    with unwrap_model_for_generation(model, accelerator, gradient_checkpointing_kwargs=options) as whole:
        # DeepSpeed compares the orders of modules over the ranks at the first two forward passes that follow. A rank
        # that plays no episode runs none, so that the others would wait for it.
        with torch.no_grad(), evaluation_mode(whole):
            for _ in range(2):
                whole(input_ids=torch.zeros(1, 1, dtype=torch.long, device=accelerator.device), use_cache=False)
        yield


def announce_head(model: Any, accelerator: Accelerator) -> None:
    """Tell ZeRO-3 of the weights that TRL's fused head reads without calling their module.

    DeepSpeed finds them out when they are first read. By then it has recorded, from sampling, in which order a forward
    pass gathers weights, and would refuse a pass with another.

    Args:
        model: The model in training, unwrapped.
        accelerator: Knows the stage.
    """
    if zero_stage(accelerator) != 3:
        return
    zero: Any = importlib.import_module("deepspeed.runtime.zero")  # an extra

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for parameter in base.get_output_embeddings().parameters(recurse=False):
        zero.register_external_parameter(base, parameter)


def is_in_pieces(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 holds a parameter in pieces."""
    return hasattr(parameter, "ds_tensor")


def own_piece(parameter: Any) -> torch.Tensor:
    """This rank's piece of a parameter that ZeRO-3 holds in pieces, 1-dim, without what only fills it up."""
    piece: torch.Tensor = parameter.ds_tensor
    rank = dist.get_rank(parameter.ds_process_group)
    return piece.flatten()[: max(0, parameter.ds_numel - rank * piece.ds_numel)]  # type: ignore[attr-defined]
