"""Check how DeepSpeed is started, and that its config says what the settings say."""

from __future__ import annotations

import logging
import os
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate.utils import str_to_bool

from agentsgym.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

_WHOLE: Final = "stage3_gather_16bit_weights_on_model_save"


def check_launch(args: Any) -> None:
    """Check what DeepSpeed needs before it starts, and on CPUs say which backend joins the ranks.

    Args:
        args: The settings as they were given. ``ddp_backend`` is set on CPUs, where it is not.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        ConfigError: It cannot start here in this way.
    """
    by_launcher = bool(str_to_bool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false")))
    if not (args.deepspeed or by_launcher):
        return
    if find_spec("deepspeed") is None:
        raise MissingDependencyError("deepspeed", "deepspeed")
    if torch.accelerator.is_available() and not args.use_cpu:
        return
    if not by_launcher:
        raise ConfigError(
            "GRPOEnvConfig.deepspeed starts DeepSpeed on accelerators alone, and this run has none: leave it out, and "
            "start with `accelerate launch --use_deepspeed --deepspeed_config_file FILE`, which works on CPUs too"
        )
    if args.use_cpu:
        raise ConfigError(
            "(use_cpu=True) accelerate leaves DeepSpeed aside where it is set, so that each rank would train a model "
            "of its own: leave it out, and on a machine that has accelerators too set DS_ACCELERATOR=cpu"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"DeepSpeed compiles what its ranks exchange gradients with on CPUs, and there is no {compiler!r}: install "
            "a C++ compiler (Debian and Ubuntu: apt-get install g++), or train without DeepSpeed"
        )
    args.ddp_backend = args.ddp_backend or "gloo"  # else accelerate finds none, and believes in one process


def check_config(args: TrainingArguments, plugin: Any) -> None:
    """Check DeepSpeed's config against the settings, and give it those of them that it leaves open.

    Args:
        args: The settings.
        plugin: Accelerate's ``DeepSpeedPlugin``, whose config transformers has compared with the settings.

    Raises:
        ConfigError: They contradict each other, or the config asks for what is not trained correctly here.
    """
    config: dict[str, Any] = plugin.hf_ds_config.config
    if plugin.zero_stage not in {1, 2, 3}:
        raise ConfigError(
            f"the config of DeepSpeed has ZeRO stage {plugin.zero_stage}, which shards nothing: leave DeepSpeed out, "
            "or set stage 1, 2 or 3"
        )
    if config.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        raise ConfigError(
            "the config of DeepSpeed has tensor_parallel.autotp_size above 1: ranks that share a row would each play "
            "rollouts of their own: leave it out"
        )
    if mismatches := plugin.hf_ds_config.mismatches:
        told = "; ".join(one.removeprefix("- ds ").replace(" vs hf ", " there, and ") for one in mismatches)
        raise ConfigError(
            f"the config of DeepSpeed and the settings contradict each other: {told} in the settings. Write 'auto' "
            "there, and the settings' value is taken (accelerate writes 1 where a file has no "
            "gradient_accumulation_steps)"
        )
    # DeepSpeed would take what is missing for 0, no clipping, and refuse to start.
    config.setdefault("gradient_clipping", args.max_grad_norm)
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
    if plugin.zero_stage == 3 and saves and not config["zero_optimization"].get(_WHOLE):
        logger.warning(
            "the config of DeepSpeed has no %s=true: a run goes on from its checkpoints, but they hold no whole model, "
            "which DeepSpeed's zero_to_fp32.py makes of them",
            _WHOLE,
        )
