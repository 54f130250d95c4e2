"""A trainer whose runs can be killed at any moment and resumed: the base of ``GRPOEnvTrainer``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import PartialState
from trl import GRPOTrainer

from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.training._trl import NoTelemetry
from agentsgym.training.finite import NumberCheck
from agentsgym.training.lifecycle.checkpoint_files import CheckpointWriter
from agentsgym.training.lifecycle.checkpoints import (
    load_checkpoint,
    load_curriculum,
    load_order,
    load_reference,
    save_checkpoint,
    save_run_state,
)
from agentsgym.training.lifecycle.preemption import Memory, Preemption
from agentsgym.training.lifecycle.resuming import RestoreDataOrder, ResumePoint, facts_of, find_resume_point

if TYPE_CHECKING:
    from types import TracebackType

    from transformers.trainer_utils import TrainOutput

    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.training._trl import TRLSeam
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.curriculum import Curriculum
    from agentsgym.training.generation.generator import RolloutGenerator
    from agentsgym.training.observing import BatchObserver
    from agentsgym.training.policy.value_head import ValueModel


_open: WeakSet[OpenRun] = WeakSet()


class OpenRun:
    """Marks a trainer as open; the process group ends with the last open trainer of the process."""

    def __init__(self) -> None:
        """Open it; the mark disappears with its trainer."""
        _open.add(self)

    def check(self) -> None:
        """Raise :class:`AgentsGymError` if it is closed."""
        if self not in _open:
            raise AgentsGymError("this trainer is closed, including its pool and its process group: create another")

    def close(self, release: Callable[[], None], *, after_error: bool) -> None:
        """Collective unless after an error: release the trainer, and with the last open one end the process group.

        A second call does nothing.

        Args:
            release: Ends whatever keeps running, and drops references to the group.
            after_error: Whether an error ended the run: then the other ranks are not waited for.
        """
        if self not in _open:
            return
        _open.discard(self)
        if not after_error:
            PartialState().wait_for_everyone()  # no rank leaves while another sends
        try:
            release()
        finally:
            gc.collect()
        if not _open:
            end_process_group()


def end_process_group() -> None:
    """Leave the process group, and end its threads, unless something still refers to it."""
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        PartialState().destroy_process_group()


class RestartableTrainer(NoTelemetry, GRPOTrainer):
    """TRL's trainer with atomic checkpoints, from which runs resume exactly."""

    args: GRPOEnvConfig
    value_model: ValueModel | None
    generator: RolloutGenerator
    observers: list[BatchObserver]
    curriculum: Curriculum | None = None

    def _watch_over(self, seam: TRLSeam) -> None:
        """Set up checkpoints, preemption and checks of numbers; called at the end of the constructor."""
        self._checkpoints = CheckpointWriter(seam, self.args, partial(facts_of, self.args, self.train_dataset))
        self._resumed = ResumePoint()
        self._run_seam = seam
        self._preemption = Preemption(seam, self.args, self._memories)
        self._numbers = NumberCheck(self.value_model)
        self.add_callback(RestoreDataOrder())
        self.add_callback(self._numbers)
        self.add_callback(self._preemption)
        self._open_run = OpenRun()

    def _memories(self) -> list[Memory]:
        """Return the states that a generation batch changes, beside random generators and counts."""
        kept = (self.estimator.state, self.curriculum, self.generator.order)
        return [memory for memory in kept if memory is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(after_error=error is not None)

    def close(self) -> None:
        """Collective: end what the trainer keeps running; ``with`` blocks call it at their end.

        The pool's threads or processes end, and the optimizer and the model's wrappers are dropped. With the last open
        trainer of the process the process group ends, after which ranks cannot communicate. The log and ``model`` can
        still be read, unless its weights are sharded; anything else raises. A second call does nothing. A ``with``
        block that an exception ends does not wait for the other ranks.
        """
        self._close(after_error=False)

    def _close(self, *, after_error: bool) -> None:
        def release() -> None:
            self.generator.close()
            for observer in self.observers:
                observer.close()
            self._run_seam.release()

        self._open_run.close(release, after_error=after_error)

    @property
    def estimator(self) -> BoundEstimator:
        """The estimator of advantages; its ``state`` persists between generation batches."""
        raise NotImplementedError

    def _begin_run(self) -> None:
        """Reset all state of an earlier run of this trainer."""
        raise NotImplementedError

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as transformers does; starting or resuming resets all state of an earlier run of this trainer.

        Args:
            resume_from_checkpoint: A checkpoint's folder; True for the newest whole one of ``args.output_dir``;
                ``"auto"`` for that or, where there is none, a new run. A run that is finished does nothing more.
            *args: Arguments of transformers' method.
            **kwargs: Likewise.

        Raises:
            ConfigError: There is no such checkpoint, it is damaged, or it is of a run that played other tasks.
            CheckpointError: A checkpoint could not be written.
            Preempted: SIGTERM, SIGHUP or Ctrl-C ended the run; it can be resumed from the exception's ``checkpoint``.
            NonFiniteError: A loss, a gradient or a weight became NaN or infinite.
            AgentsGymError: The trainer is closed.
        """
        self._open_run.check()
        self._begin_run()
        self._resumed = ResumePoint()
        if resume_from_checkpoint:
            *_, max_steps = super().set_initial_training_values(self.args, self.get_train_dataloader())
            facts, run_folder = facts_of(self.args, self.train_dataset), Path(self._run_seam.run_folder())
            self._resumed = find_resume_point(resume_from_checkpoint, run_folder, self.args, facts, max_steps)
        folder = self._resumed.folder
        if folder is not None:
            load_checkpoint(folder, self.estimator, self.value_model)
            load_curriculum(folder, self.curriculum)
            groups_per_batch = cast("int", self.args.generation_batch_size) // cast("int", self.args.num_generations)
            self.generator.begin_run(self.args.generations_at(self._resumed.step) * groups_per_batch)
            load_order(folder, self.generator.order)
            load_reference(folder, self._run_seam.synced_reference())
        train = partial(super().train, None if folder is None else str(folder), *args, **kwargs)
        return self._preemption.run(train, folder)

    def _check_can_evaluate(self) -> None:
        """Raise where the trainer is closed, or transformers would set DeepSpeed up for evaluations alone."""
        self._open_run.check()
        if self.is_deepspeed_enabled and self.deepspeed is None:
            raise ConfigError("with DeepSpeed, evaluate() works only after training has begun: set eval_on_start=True")

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Count passes and steps as transformers does; a finished run has no passes left."""
        num_passes, *others, max_steps = super().set_initial_training_values(args, dataloader)
        return 0 if self._resumed.step >= max_steps else num_passes, *others, max_steps

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Collective: go backward as TRL does, and raise if the step that comes next would use NaN or infinity."""
        loss = super().training_step(*args, **kwargs)
        self._numbers.after_backward(loss, self.accelerator, self.state.global_step + 1)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, with the value head and the estimator's state beside the model.

        Raises:
            NonFiniteError: A weight is NaN or infinite; nothing is written.
        """
        self._open_run.check()
        self._numbers.check_before_saving(self.model)
        with self._checkpoints.keeping_errors():
            super().save_model(output_dir, _internal_call)
            if self.args.should_save:
                folder = Path(output_dir or cast("str", self.args.output_dir))
                save_checkpoint(folder, self.estimator, self.value_model)
                if _internal_call:
                    reference = self._run_seam.synced_reference()
                    save_run_state(folder, self.curriculum, self.generator.order, reference)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint as transformers does, under another name until it is whole."""
        whole = self._run_seam.saving_all_state() if self._preemption.is_leaving else contextlib.nullcontext()
        with whole:
            self._checkpoints.write(partial(super()._save_checkpoint, model, trial), trial)
