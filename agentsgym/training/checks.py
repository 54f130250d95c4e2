"""What a trainer refuses before anything is built or played."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from datasets import IterableDataset
from torch import nn

from agentsgym.envs.base import MultistepEnv
from agentsgym.errors import ConfigError
from agentsgym.training.config import GRPOEnvConfig

if TYPE_CHECKING:
    from peft import PeftConfig


logger = logging.getLogger(__name__)


def check_env(env: Any) -> None:
    """Raise :class:`ConfigError` for what is no environment of a run."""
    if not (env is None or isinstance(env, MultistepEnv)):
        wanted = f": build it with {env.__name__}(tokenizer, env_config)" if isinstance(env, type) else ""
        raise ConfigError(f"env must be a MultistepEnv or None, got {env!r}{wanted}")
    if env is not None and env.tokenizer is None:
        raise ConfigError("env has no tokenizer: build it with the policy's, as in Env(tokenizer, env_config)")


def check_model(model: Any, args: GRPOEnvConfig, peft_config: PeftConfig | None) -> None:
    """Raise :class:`ConfigError` for TRL's settings, or an adapter or a reference model that could not be had."""
    if not isinstance(args, GRPOEnvConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"args must be a GRPOEnvConfig, which has every field of TRL's, got a {type(args).__name__}")
    adapters = [*getattr(model, "peft_config", {}).values(), *([] if peft_config is None else [peft_config])]
    for adapter in adapters:
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"a {type(adapter).__name__} puts tokens of its own in front of every prompt, so that no record would "
                "be exact: use LoRA or another adapter inside the layers"
            )
    if args.beta != 0.0 and not adapters and not isinstance(model, str) and not model.config.name_or_path:
        raise ConfigError(
            "beta needs a reference model, which TRL loads from the model's path, and this model has none: "
            "save it with save_pretrained and load it with from_pretrained first"
        )


def check_size(train_dataset: Any, args: GRPOEnvConfig) -> None:
    """Raise :class:`ConfigError` for a dataset that does not fill one generation batch."""
    num_groups = cast("int", args.generation_batch_size) // cast("int", args.num_generations)  # TRL has filled both in
    if not isinstance(train_dataset, IterableDataset) and len(train_dataset) < num_groups:
        raise ConfigError(
            f"train_dataset must hold at least {num_groups} rows, one for each task group of a generation batch "
            f"({args.generation_batch_size} rollouts, {args.num_generations} a group), got {len(train_dataset)}: "
            "with fewer nothing would be trained"
        )


def check_parts(trainer: Any) -> None:
    """Raise :class:`ConfigError` for a model or an optimizer that a setting does not go together with."""
    args: GRPOEnvConfig = trainer.args
    _warn_of_dropout(trainer.model, args)
    if args.layout != "trajectory" and trainer.aux_loss_enabled:
        raise ConfigError(
            "layout='turn' makes the number of rows vary, and a mixture of experts' auxiliary loss is counted once for "
            "each part of a micro-batch: set router_aux_loss_coef to 0"
        )
    if args.value_head is not None and trainer.lr_scheduler is not None:
        raise ConfigError(
            "value_head adds a group of parameters to the optimizer, which a scheduler given in `optimizers` does not "
            "know: pass (optimizer, None) and set lr_scheduler_type"
        )


def check_passes(args: GRPOEnvConfig, num_micro_batches: int, max_steps: int) -> None:
    """Raise :class:`ConfigError` for a run whose optimizer steps drift away from its generation batches.

    Args:
        args: The settings.
        num_micro_batches: Those of a pass over the dataset, the last of which ends an optimizer step in any case.
        max_steps: Optimizer steps of the run.
    """
    accumulation = args.gradient_accumulation_steps
    has_passes = max_steps > math.ceil(num_micro_batches / accumulation)
    if num_micro_batches % accumulation and has_passes:
        raise ConfigError(
            f"gradient_accumulation_steps={accumulation} divides neither the {args.micro_steps_per_generation} "
            f"micro-batches that a generation batch is trained on nor the {num_micro_batches} of a pass over the "
            "dataset, so that checkpoints could not be resumed from exactly: make it a divisor of "
            "steps_per_generation * num_iterations"
        )


def _warn_of_dropout(model: nn.Module, args: GRPOEnvConfig) -> None:
    if not args.disable_dropout and any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules()):
        logger.warning(
            "the policy has dropout: rollouts are sampled and scored without it, the loss runs with it, so that "
            "importance ratios and the KL term are noisy; disable_dropout=True takes it out of all of them"
        )


def finite_datasets(**datasets: Any) -> Iterator[tuple[str, Any]]:
    """The datasets that can be read through in advance, each with the name that errors call it by."""
    for name, dataset in datasets.items():
        if isinstance(dataset, dict):
            yield from finite_datasets(**{f"{name}[{key!r}]": part for key, part in dataset.items()})
        elif dataset is not None and not isinstance(dataset, IterableDataset):
            yield name, dataset
