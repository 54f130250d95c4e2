"""What a run learns beside its model: the value head, and what the estimator remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from agentsgym.errors import ConfigError
from agentsgym.training.value_head import FILE_NAME

if TYPE_CHECKING:
    from agentsgym.credit.advantages import BoundEstimator, PotentialShaping
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.training.value_head import ValueModel

_MEMORY = "estimator.json"


def save_learnt(trainer: GRPOEnvTrainer, folder: Path) -> None:
    """Write it beside the model."""
    if trainer.value_model is not None:
        trainer.value_model.save(folder)
    estimator = trainer.estimator
    if estimator.memory is not None:
        state = {"estimator": estimator.name, "options": _written(estimator), "memory": estimator.memory.state_dict()}
        (folder / _MEMORY).write_text(json.dumps(state))


def load_learnt(trainer: GRPOEnvTrainer, folder: Path) -> None:
    """Read it back.

    Raises:
        ConfigError: The checkpoint has no value head, or one of another shape, or not what this estimator remembers.
    """
    if not folder.is_dir():
        return  # Trainer says so
    if trainer.value_model is not None:
        trainer.value_model.load(folder)
    elif (folder / FILE_NAME).is_file():
        raise ConfigError(f"{folder} was saved with a value head, which value_head=None would lose: set it as it was")
    estimator, path = trainer.estimator, folder / _MEMORY
    if estimator.memory is None:
        return
    if not path.is_file():
        raise ConfigError(f"{path} is missing: {estimator.name!r} is to go on from the averages that it held")
    try:
        state = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged, go on from another checkpoint: {error}") from error
    if (state["estimator"], state["options"]) != (estimator.name, _written(estimator)):
        raise ConfigError(
            f"{path} holds what {state['estimator']!r} remembered with the options {state['options']}, and the run is "
            f"to go on with {estimator.name!r} and {_written(estimator)}"
        )
    estimator.memory.load_state_dict(state["memory"])


def _written(estimator: BoundEstimator | PotentialShaping) -> dict[str, str]:
    options = sorted(estimator.options.items())
    return {name: getattr(value, "__qualname__", repr(value)) for name, value in options}  # repr may hold an address


class ValueSteps(TrainerCallback):
    """Does for the value head what ``Trainer`` does for its model alone: gradients of all ranks, clip, afresh."""

    def __init__(self, value_model: ValueModel) -> None:
        """Take whose gradients they are."""
        self._value_model = value_model

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin alike on all ranks, without what an interrupted run left."""
        self._value_model.broadcast()
        self._value_model.zero_grad()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the gradients those of all ranks, and no larger than the policy's may be."""
        self._value_model.reduce_gradients()
        if args.max_grad_norm:
            self._value_model.clip(args.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the gradients that were just used."""
        self._value_model.zero_grad()
