"""Save and load the state that this trainer adds: value head, estimator, curriculum, task order, synced reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_model, save_model

from agentsgym.errors import ConfigError
from agentsgym.training.objectives.value_head import VALUE_HEAD_FILE

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.training.generation.in_flight import TaskOrder
    from agentsgym.training.objectives.value_head import ValueModel
    from agentsgym.training.selection.curriculum import Curriculum

_ESTIMATOR_FILE = "estimator.json"
_CURRICULUM_FILE = "curriculum.json"
_ORDER_FILE = "task_order.json"
_REFERENCE_FILE = "reference.safetensors"


def save_checkpoint(folder: Path, estimator: BoundEstimator, value_model: ValueModel | None) -> None:
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


def load_checkpoint(folder: Path, estimator: BoundEstimator, value_model: ValueModel | None) -> None:
    """Load the value head and the estimator's state from the folder of a model."""
    if value_model is not None:
        value_model.load(folder)
    elif (folder / VALUE_HEAD_FILE).is_file():
        raise ConfigError(
            f"{folder} was saved with a value head, which value_head=None would drop: set value_head as in that run"
        )
    path = folder / _ESTIMATOR_FILE
    if estimator.state is None:
        return
    if not path.is_file():
        raise ConfigError(f"{path} is missing: {estimator.name!r} cannot be resumed without the averages stored there")
    state = _read(path)
    if (state["estimator"], state["options"]) != (estimator.name, _plain_options(estimator)):
        raise ConfigError(
            f"{path} contains the state of {state['estimator']!r} with the options {state['options']}, but this run "
            f"uses {estimator.name!r} with {_plain_options(estimator)}"
        )
    estimator.state.load_state_dict(state["memory"])


def save_run_state(folder: Path, curriculum: Curriculum | None, order: TaskOrder | None, reference: Any) -> None:
    """Write the parts of a run's state into a checkpoint, skipping those that are None."""
    if curriculum is not None:
        state = {"options": curriculum.options, "results": curriculum.state_dict()}
        (folder / _CURRICULUM_FILE).write_text(json.dumps(state))
    if order is not None:
        (folder / _ORDER_FILE).write_text(json.dumps(order.state_dict()))
    if reference is not None:
        save_model(reference, str(folder / _REFERENCE_FILE))


def load_curriculum(folder: Path, curriculum: Curriculum | None) -> None:
    """Load the results of a curriculum."""
    path = folder / _CURRICULUM_FILE
    if curriculum is None:
        if path.is_file():
            raise ConfigError(f"{folder} was saved with a curriculum, but this run has none: pass the same curriculum")
        return
    if not path.is_file():
        raise ConfigError(f"{path} is missing: the curriculum cannot be resumed without the win rates stored there")
    state = _read(path)
    if state["options"] != curriculum.options:
        raise ConfigError(
            f"{path} belongs to a curriculum with {state['options']}, but this run has {curriculum.options}: "
            "set the same options"
        )
    curriculum.load_state_dict(state["results"])


def load_order(folder: Path, order: TaskOrder | None) -> None:
    """Load which task groups were trained on.

    If there is no file, rollouts did not run ahead, and the groups were trained on in order.
    """
    path = folder / _ORDER_FILE
    if order is None or not path.is_file():
        return
    try:
        order.load_state_dict(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged, resume from another checkpoint: {error!r}") from error


def load_reference(folder: Path, reference: Any) -> None:
    """Load the reference model that ``sync_ref_model`` updates; do nothing if ``reference`` is None."""
    if reference is None:
        return
    path = folder / _REFERENCE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: resume from a checkpoint of a run with sync_ref_model=True, or set it to False"
        )
    load_model(reference, path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged, resume from another checkpoint: {error}") from error


def _plain_options(estimator: BoundEstimator) -> dict[str, str]:
    options = sorted(estimator.options.items())
    return {name: getattr(value, "__qualname__", repr(value)) for name, value in options}  # repr may hold an address
