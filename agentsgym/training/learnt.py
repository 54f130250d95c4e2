"""What a run learns beside its model: the value head, and what the estimator remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.training.value_head import ValueModel

_MEMORY = "estimator.json"


def save_learnt(trainer: GRPOEnvTrainer, folder: Path) -> None:
    """Write it beside the model."""
    if trainer.value_model is not None:
        trainer.value_model.save(folder)
    if (memory := trainer.estimator_memory) is not None:
        (folder / _MEMORY).write_text(json.dumps(memory.state_dict()))


def load_learnt(trainer: GRPOEnvTrainer, folder: Path) -> None:
    """Read it back.

    Raises:
        ConfigError: The checkpoint has no value head, or one of another shape.
    """
    if trainer.value_model is not None:
        trainer.value_model.load(folder)
    memory, path = trainer.estimator_memory, folder / _MEMORY
    if memory is not None and path.exists():
        memory.load_state_dict(json.loads(path.read_text()))


class ValueSteps(TrainerCallback):
    """Does for the value head what ``Trainer`` does for its model alone: gradients of all ranks, clip, afresh."""

    def __init__(self, value_model: ValueModel) -> None:
        """Take whose gradients they are."""
        self._value_model = value_model

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the gradients those of all ranks, and no larger than the policy's may be."""
        self._value_model.reduce_gradients()
        if args.max_grad_norm:
            self._value_model.clip(args.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the gradients that were just used."""
        self._value_model.zero_grad()
