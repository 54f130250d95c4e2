"""A trainer whose runs can be killed at any moment and resumed: the base of ``GRPOEnvTrainer``."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_model, save_model
from trl import GRPOTrainer

from agentsgym.agents.policy.saving import save_rest
from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.training._trl import NoTelemetry
from agentsgym.training.finite import NonFiniteCheck
from agentsgym.training.lifecycle.checkpoint_files import CheckpointWriter
from agentsgym.training.lifecycle.preemption import Preemption, Stateful
from agentsgym.training.lifecycle.resuming import RestoreDataOrder, ResumePoint, facts_of, find_resume_point
from agentsgym.training.objectives.value_head import VALUE_HEAD_FILE

if TYPE_CHECKING:
    from types import TracebackType

    from transformers.trainer_utils import TrainOutput

    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.envs.datasets.environments import Environments
    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.generation.generator import RolloutGenerator
    from agentsgym.training.generation.in_flight import TaskOrder
    from agentsgym.training.objectives.value_head import ValueModel
    from agentsgym.training.observing import BatchObserver
    from agentsgym.training.selection.curriculum import Curriculum

logger = logging.getLogger(__name__)

_ESTIMATOR_FILE = "estimator.json"
_CURRICULUM_FILE = "curriculum.json"
_ORDER_FILE = "task_order.json"
_REFERENCE_FILE = "reference.safetensors"
_open: WeakSet[RestartableTrainer] = WeakSet()  # closing the last of this process destroys the process group


def end_process_group() -> None:
    """Destroy the process group; its threads end once nothing refers to it."""
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        PartialState().destroy_process_group()


class RestartableTrainer(NoTelemetry, GRPOTrainer):
    """TRL's trainer with atomic checkpoints, from which runs resume exactly."""

    args: GRPOEnvConfig
    _trl: TRLInterface
    value_model: ValueModel | None
    generator: RolloutGenerator
    observers: list[BatchObserver]
    environments: Environments
    curriculum: Curriculum | None = None
    _given_processing_class: Any = None  # may be a processor, of which the trainer has the tokenizer

    def _set_up_lifecycle(self) -> None:
        """Set up checkpoints, preemption and checks for NaN and infinity; called at the end of the constructor."""
        self._checkpoints = CheckpointWriter(self._trl, self.args, self._facts)
        self._resumed = ResumePoint()
        self._preemption = Preemption(self._trl, self.args, self._stateful_parts)
        self._finite_check = NonFiniteCheck(self.value_model)
        self.add_callback(RestoreDataOrder())
        self.add_callback(self._finite_check)
        self.add_callback(self._preemption)
        _open.add(self)

    def _facts(self) -> dict[str, Any]:
        return facts_of(self.args, self.train_dataset, self.environments.env_config)

    def _stateful_parts(self) -> list[Stateful]:
        """Return the stateful parts that a generation batch changes, in addition to random generators and counters."""
        parts = (self.estimator.state, self.curriculum, self.generator.order)
        return [part for part in parts if part is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(after_error=error is not None)

    def close(self) -> None:
        """Stop the trainer's background work and free its resources. Collective; a ``with`` block calls it on exit.

        The pool's threads or processes end, and the optimizer and the model's wrappers are dropped. Closing the last
        open trainer of a process destroys the process group, after which ranks cannot communicate. The log can still
        be read, and ``model`` too unless its weights are sharded; anything else raises. A second call does nothing. A
        ``with`` block that ends with an exception does not wait for the other ranks.
        """
        self._close(after_error=False)

    def _close(self, *, after_error: bool) -> None:
        if self not in _open:
            return
        _open.discard(self)
        if not after_error:
            PartialState().wait_for_everyone()  # no rank leaves while another is still sending
        try:
            self.generator.close()
            for observer in self.observers:
                observer.close()
            self._trl.release()
        finally:
            gc.collect()
        if not _open:
            end_process_group()

    def _check_open(self) -> None:
        if self not in _open:
            raise AgentsGymError("this trainer, its pool and its process group are closed: create another trainer")

    @property
    def estimator(self) -> BoundEstimator:
        """The estimator of advantages; its ``state`` persists between generation batches."""
        raise NotImplementedError

    def _begin_run(self) -> None:
        """Reset all state that an earlier run of this trainer left."""
        raise NotImplementedError

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as transformers does; starting or resuming resets all state of an earlier run of this trainer.

        Args:
            resume_from_checkpoint: A checkpoint's folder; True for the newest complete checkpoint in
                ``args.output_dir``; ``"auto"`` to do the same if there is one, and otherwise to start a new run. None
                for the value in ``args``. Resuming a finished run does nothing.
            *args: Arguments of transformers' method.
            **kwargs: Keyword arguments of transformers' method.

        Raises:
            ConfigError: There is no such checkpoint, it is damaged, or its run would have continued with other tasks.
            CheckpointError: A checkpoint could not be written.
            Preempted: SIGTERM, SIGHUP or Ctrl-C ended the run; it can be resumed from the exception's ``checkpoint``.
            NonFiniteError: A loss, a gradient or a weight became NaN or infinite.
            AgentsGymError: The trainer is closed.
        """
        self._check_open()
        self._begin_run()
        self._resumed = ResumePoint()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if resume_from_checkpoint:
            *_, max_steps = super().set_initial_training_values(self.args, self.get_train_dataloader())
            facts, run_folder = self._facts(), Path(self._trl.run_folder())
            self._resumed = find_resume_point(resume_from_checkpoint, run_folder, self.args, facts, max_steps)
        elif self.args.should_save and (others := sorted(Path(self._trl.run_folder()).glob("checkpoint-*"))):
            text = "%s is of another run: train into another folder, or continue that run with resume_from_checkpoint"
            logger.warning(text, others[0])
        folder = self._resumed.folder
        if folder is not None:
            self._trl.check_adapters(folder)
            load_checkpoint(folder, self.estimator, self.value_model)
            load_curriculum(folder, self.curriculum)
            groups_per_batch = cast("int", self.args.generation_batch_size) // cast("int", self.args.num_generations)
            self.generator.begin_run(self.args.generations_at(self._resumed.step) * groups_per_batch)
            load_order(folder, self.generator.order)
            load_reference(folder, self._trl.synced_reference())
        train = partial(super().train, None if folder is None else str(folder), *args, **kwargs)
        with contextlib.ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.training(self._resumed.step if resume_from_checkpoint else None))
            return self._preemption.run(train, folder)

    def _check_can_evaluate(self) -> None:
        """Raise if the trainer is closed, or if transformers would set up DeepSpeed only for evaluation."""
        self._check_open()
        if self.is_deepspeed_enabled and self.deepspeed is None:
            raise ConfigError("with DeepSpeed, evaluate() works only after training has begun: set eval_on_start=True")

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Count epochs and steps as transformers does; a finished run has no epochs left."""
        num_epochs, *others, max_steps = super().set_initial_training_values(args, dataloader)
        return 0 if self._resumed.step >= max_steps else num_epochs, *others, max_steps

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run TRL's training step, and raise if the optimizer would use NaN or infinite values. Collective."""
        loss = super().training_step(*args, **kwargs)
        self._finite_check.after_backward(loss, self.accelerator, self.state.global_step + 1)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, and add the value head and the estimator's state.

        Raises:
            NonFiniteError: A weight is NaN or infinite; nothing is written.
        """
        self._check_open()
        self._finite_check.check_before_saving(self.model)
        with self._checkpoints.deferring_errors():
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                folder = Path(output_dir or cast("str", self.args.output_dir))
                save_checkpoint(folder, self.estimator, self.value_model)
                save_rest(self._given_processing_class, self._trl.policy(), folder)
                if _internal_call:
                    reference = self._trl.synced_reference()
                    save_run_state(folder, self.curriculum, self.generator.order, reference)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint as transformers does, under a temporary name until it is complete."""
        is_stopping = self._preemption.is_stopping
        with self._trl.saving_all_state() if is_stopping else contextlib.nullcontext():
            self._checkpoints.write(partial(super()._save_checkpoint, model, trial), trial)


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
    state = _read(path)
    try:
        order.load_state_dict(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
