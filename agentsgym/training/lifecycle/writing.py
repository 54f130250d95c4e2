"""Write a checkpoint under another name, and rename it once it is whole, so that a kill never leaves half of one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import rotate_checkpoints

from agentsgym.errors import AgentsGymError, CheckpointError
from agentsgym.ranks import KeptError, all_gather_objects
from agentsgym.training.lifecycle.checkpoint_files import UNFINISHED, write_manifest

if TYPE_CHECKING:
    from agentsgym.training._trl import TRLSeam
    from agentsgym.training.config import GRPOEnvConfig


class CheckpointWriter:
    """Writes the checkpoints of a run."""

    def __init__(self, seam: TRLSeam, args: GRPOEnvConfig, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Write nothing yet.

        Args:
            seam: The seam with TRL.
            args: The settings.
            facts: What the list of a checkpoint's files is to hold besides: asked at each checkpoint.
        """
        self._seam = seam
        self._args = args
        self._facts = facts
        self._error: KeptError | None = None

    @contextlib.contextmanager
    def keeping_errors(self) -> Generator[None]:
        """Inside of a checkpoint, keep what saving the model raises until all ranks can raise it.

        Right after it transformers may wait for the other ranks, which an error here would leave waiting.
        """
        if self._error is None:
            yield
        else:
            with self._error.keeping():
                yield

    def write(self, save: Callable[[], None], trial: Any = None) -> None:
        """Collective: have a checkpoint written, and give it its name when it is whole.

        Args:
            save: Writes it, as transformers does, into the folder that the seam names meanwhile.
            trial: Of a hyperparameter search, which has a folder for each.

        Raises:
            CheckpointError: It cannot be written; what was saved before stands.
        """
        run_folder = Path(self._seam.run_folder(trial))
        place = run_folder / f"checkpoint-{self._seam.global_step}"
        unfinished = run_folder / UNFINISHED
        self._on_all_ranks(place, lambda: self._clear(unfinished))
        with self._seam.saving_into(unfinished):
            self._on_all_ranks(place, save)
            self._on_all_ranks(place, lambda: self._finish(unfinished / place.name, place))
        if self._args.push_to_hub:
            self._seam.push_checkpoint(place)

    def _on_all_ranks(self, place: Path, function: Callable[[], None]) -> None:
        """Collective: call a function, and raise on all ranks what it raises on any."""
        self._error = error = KeptError()
        try:
            with error.keeping():
                function()
        finally:
            self._error = None
        first = error.first
        if first is not None and not isinstance(first, AgentsGymError):  # which says itself what is wrong
            first = CheckpointError(
                f"{place} could not be written: {_reason(first)}; the checkpoints before it are as they were"
            )
            first.__cause__ = error.first
        try:
            all_gather_objects((), first)
        except AgentsGymError as raised:
            self._clear(place.parent / UNFINISHED)  # a disk that is full has room again
            if type(raised) is AgentsGymError:  # another rank's
                raise CheckpointError(str(raised)) from raised
            raise

    def _clear(self, unfinished: Path) -> None:
        if self._args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _finish(self, folder: Path, place: Path) -> None:
        """Mark a checkpoint as whole, bring it to the disk, and give it its name."""
        if not self._args.should_save:
            self._seam.name_best_checkpoint(place)
            return
        self._seam.name_best_checkpoint(place, folder)
        write_manifest(folder, **self._facts())
        _sync(folder)
        replaced = folder.with_name("replaced")
        if place.exists():  # the run was resumed before it; `finish_renames` mends a kill between the two renames
            place.rename(replaced)
        try:
            folder.rename(place)
        except OSError:
            if replaced.exists():
                replaced.rename(place)
            raise
        shutil.rmtree(folder.parent, ignore_errors=True)
        _sync_folder(place.parent)
        rotate_checkpoints(
            output_dir=str(place.parent),
            save_total_limit=self._args.save_total_limit,
            best_model_checkpoint=self._seam.best_checkpoint,
            use_mtime=True,
        )


def _reason(error: BaseException) -> str:
    """What the operating system said, which libraries may hide behind errors of their own."""
    one: BaseException | None = error
    while one is not None and not isinstance(one, OSError):
        one = one.__cause__ or one.__context__
    return f"{type(error).__name__}: {error}" if one is None else str(one)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system has it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
