"""Train under DeepSpeed ZeRO, whose engine takes the optimizer steps, and at stage 3 shards the weights.

Also check how DeepSpeed is started, and that its config agrees with the settings.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
from collections.abc import Generator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, str_to_bool
from trl.models import unwrap_model_for_generation

from agentsgym.agents.policy.model import evaluation_mode
from agentsgym.agents.policy.sharded import zero_stage
from agentsgym.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

_WHOLE: Final = "stage3_gather_16bit_weights_on_model_save"


def check_launch(args: Any) -> None:
    """Check what DeepSpeed needs before it starts, and on CPUs choose the backend of the ranks."""
    by_launcher = bool(str_to_bool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))
    if not (args.deepspeed or by_launcher):
        return
    if find_spec("deepspeed") is None:
        raise MissingDependencyError("deepspeed", "deepspeed")
    if torch.accelerator.is_available() and not args.use_cpu:
        return
    if not by_launcher:
        raise ConfigError(
            "GRPOEnvConfig.deepspeed starts DeepSpeed only on accelerators, but this run has none: leave it out, and "
            "start with `accelerate launch --use_deepspeed --deepspeed_config_file FILE`, which works on CPUs too"
        )
    if args.use_cpu:
        raise ConfigError(
            "(use_cpu=True) accelerate ignores DeepSpeed with this setting, so each rank would train its own model: "
            "leave it out, and set DS_ACCELERATOR=cpu on a machine that also has accelerators"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"DeepSpeed compiles its gradient communication for CPUs, but {compiler!r} was not found: install a C++ "
            "compiler (Debian and Ubuntu: apt-get install g++), or train without DeepSpeed"
        )
    args.ddp_backend = args.ddp_backend or "gloo"  # else accelerate finds none, and assumes one process


def check_config(args: TrainingArguments, plugin: Any) -> None:
    """Check DeepSpeed's config against the settings, and complete it with them.

    Args:
        args: The settings.
        plugin: Accelerate's ``DeepSpeedPlugin``, whose config transformers has compared with the settings.
    """
    config: dict[str, Any] = plugin.hf_ds_config.config
    if plugin.zero_stage not in {1, 2, 3}:
        raise ConfigError(
            f"the DeepSpeed config has ZeRO stage {plugin.zero_stage}, which shards nothing: leave DeepSpeed out, or "
            "set stage 1, 2 or 3"
        )
    if config.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        raise ConfigError(
            "the DeepSpeed config has tensor_parallel.autotp_size above 1: ranks that share a row would each play "
            "their own rollouts: leave it out"
        )
    if mismatches := plugin.hf_ds_config.mismatches:
        conflicts = "; ".join(one.removeprefix("- ds ").replace(" vs hf ", " there, and ") for one in mismatches)
        raise ConfigError(
            f"the DeepSpeed config and the settings conflict: {conflicts} in the settings. Write 'auto' there to use "
            "the settings' value (accelerate writes 1 where a file has no gradient_accumulation_steps)"
        )
    # DeepSpeed would read a missing value as 0, no clipping, and refuse to start.
    config.setdefault("gradient_clipping", args.max_grad_norm)
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
    if plugin.zero_stage == 3 and saves and not config["zero_optimization"].get(_WHOLE):
        logger.warning(
            "the DeepSpeed config lacks %s=true: its checkpoints can be resumed, but contain no full model, which "
            "DeepSpeed's zero_to_fp32.py can build from them",
            _WHOLE,
        )


def backward_of_part(accelerator: Any, loss: torch.Tensor) -> None:
    """Add the gradient of a part of a micro-batch; transformers runs the backward pass of the last part.

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


def has_skipped_step(accelerator: Any) -> bool:
    """Whether DeepSpeed's engine has just silently skipped an optimizer step because gradients were not finite.

    With ``fp16`` such steps adjust the loss scale, as with a ``GradScaler``, and do not count.
    """
    engine = accelerator.deepspeed_engine_wrapped.engine
    return not (engine.was_step_applied() or engine.fp16_enabled())


@contextlib.contextmanager
def whole_weights(model: Any, accelerator: Accelerator, checkpointing: Mapping[str, Any] | None) -> Generator[None]:
    """Collective: gather all weights on every rank inside.

    Args:
        model: DeepSpeed's engine, stage 3.
        accelerator: Its accelerator.
        checkpointing: The options of gradient checkpointing, which is off inside.
    """
    options = None if checkpointing is None else dict(checkpointing)
    with unwrap_model_for_generation(model, accelerator, gradient_checkpointing_kwargs=options) as whole:
        # DeepSpeed compares the orders of modules over the ranks at the first two forward passes that follow. A rank
        # that plays no episode runs none, so that the others would wait for it.
        with torch.no_grad(), evaluation_mode(whole):
            for _ in range(2):
                whole(input_ids=torch.zeros(1, 1, dtype=torch.long, device=accelerator.device), use_cache=False)
        yield


def register_head_weights(model: Any, accelerator: Accelerator) -> None:
    """Register with ZeRO-3 the weights that TRL's fused head reads without calling their module.

    Otherwise DeepSpeed detects them when they are first read, after it has recorded from sampling the order in which a
    forward pass gathers weights, and refuses a pass with another order.
    """
    if zero_stage(accelerator) != 3:
        return
    zero: Any = importlib.import_module("deepspeed.runtime.zero")  # an extra

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for parameter in base.get_output_embeddings().parameters(recurse=False):
        zero.register_external_parameter(base, parameter)


def is_in_pieces(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 shards a parameter."""
    return hasattr(parameter, "ds_tensor")


def own_piece(parameter: Any) -> torch.Tensor:
    """Return this rank's piece of a parameter that ZeRO-3 shards, 1-dim, without padding."""
    piece: torch.Tensor = parameter.ds_tensor
    rank = dist.get_rank(parameter.ds_process_group)
    return piece.flatten()[: max(0, parameter.ds_numel - rank * piece.ds_numel)]  # type: ignore[attr-defined]
