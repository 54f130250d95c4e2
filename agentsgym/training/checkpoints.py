"""Checkpoint the value head and the estimator's state beside the model, and resume in the middle of a dataset."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from agentsgym.errors import ConfigError
from agentsgym.training.policy.value_head import FILE_NAME

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.shaping import PotentialShaping
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.policy.value_head import ValueModel

_ESTIMATOR_FILE = "estimator.json"


def save_checkpoint(folder: Path, estimator: BoundEstimator | PotentialShaping, value_model: ValueModel | None) -> None:
    """Write the value head and the estimator's state into the folder of a model."""
    if value_model is not None:
        value_model.save(folder)
    if estimator.state is not None:
        state = {
            "estimator": estimator.name,
            "options": _plain_options(estimator),
            "memory": estimator.state.state_dict(),
        }
        (folder / _ESTIMATOR_FILE).write_text(json.dumps(state))


def load_checkpoint(folder: Path, estimator: BoundEstimator | PotentialShaping, value_model: ValueModel | None) -> None:
    """Load the value head and the estimator's state from the folder of a model.

    Raises:
        ConfigError: The checkpoint has no value head, or one of another shape, or no state of this estimator.
    """
    if not folder.is_dir():
        return  # Trainer raises
    if value_model is not None:
        value_model.load(folder)
    elif (folder / FILE_NAME).is_file():
        raise ConfigError(f"{folder} was saved with a value head, which value_head=None would lose: set it as it was")
    path = folder / _ESTIMATOR_FILE
    if estimator.state is None:
        return
    if not path.is_file():
        raise ConfigError(f"{path} is missing: cannot resume {estimator.name!r} without the averages that it held")
    try:
        state = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged, resume from another checkpoint: {error}") from error
    if (state["estimator"], state["options"]) != (estimator.name, _plain_options(estimator)):
        raise ConfigError(
            f"{path} holds the state of {state['estimator']!r} with the options {state['options']}, and the run would "
            f"go on with {estimator.name!r} and {_plain_options(estimator)}"
        )
    estimator.state.load_state_dict(state["memory"])


def _plain_options(estimator: BoundEstimator | PotentialShaping) -> dict[str, str]:
    options = sorted(estimator.options.items())
    return {name: getattr(value, "__qualname__", repr(value)) for name, value in options}  # repr may hold an address


def generations_before(step: int, args: GRPOEnvConfig) -> int:
    """Count the generation batches that were played before an optimizer step.

    Raises:
        ConfigError: The step lies inside a generation cycle.
    """
    cycle = args.steps_per_cycle
    if step % cycle:
        raise ConfigError(
            f"a run resumes at a multiple of {cycle} steps, the boundaries of its generation cycle, since the rows "
            f"of a half-used cycle are not saved; got step {step}: resume from an earlier checkpoint, or start a "
            "new run with this one as its model"
        )
    return args.generations_at(step)


def check_passes(args: GRPOEnvConfig, num_microbatches: int, max_steps: int) -> None:
    """Raise :class:`ConfigError` for a run whose optimizer steps get out of step with its generation batches.

    Args:
        args: The settings.
        num_microbatches: Those of a pass over the dataset, the last of which ends an optimizer step in any case.
        max_steps: Optimizer steps of the run.
    """
    accumulation = args.gradient_accumulation_steps
    has_passes = max_steps > math.ceil(num_microbatches / accumulation)
    if num_microbatches % accumulation and has_passes:
        raise ConfigError(
            f"gradient_accumulation_steps={accumulation} divides neither the {args.micro_steps_per_generation} "
            f"micro-batches that a generation batch is trained on nor the {num_microbatches} of a pass over the "
            "dataset, so that checkpoints could not be resumed from exactly: make it a divisor of "
            "steps_per_generation * num_iterations"
        )


class RestoreDataOrder(TrainerCallback):
    """Restores the order of a resumed run's tasks, and refuses a run that could not be resumed.

    The sampler draws a new order at each pass over the dataset, and that of a resumed run starts at the first pass: the
    draws of the passes before the checkpoint are repeated.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Draw the orders of the passes that are done."""
        if train_dataloader is not None and not isinstance(train_dataloader.dataset, IterableDataset):
            check_passes(args, len(train_dataloader), state.max_steps)
        sampler: Any = getattr(train_dataloader, "get_sampler", lambda: None)()
        if isinstance(getattr(sampler, "generator", None), torch.Generator):  # a stream has none
            for _ in range(int(state.epoch + 1e-6)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
