"""What a trainer refuses before anything is built or played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from datasets import IterableDataset

from agentsgym.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig

    from agentsgym.training.config import GRPOEnvConfig


def check_model(model: Any, args: GRPOEnvConfig, peft_config: PeftConfig | None) -> None:
    """Raise :class:`ConfigError` for an adapter or a reference model that could not be had."""
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


def finite_datasets(**datasets: Any) -> Iterator[tuple[str, Any]]:
    """The datasets that can be read through in advance, each with the name that errors call it by."""
    for name, dataset in datasets.items():
        if isinstance(dataset, dict):
            yield from finite_datasets(**{f"{name}[{key!r}]": part for key, part in dataset.items()})
        elif dataset is not None and not isinstance(dataset, IterableDataset):
            yield name, dataset
