"""Write checkpoints atomically, and check whether a checkpoint is complete.

The last file of a checkpoint is its manifest: the names, sizes and checksums of the other files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import rotate_checkpoints

from agentsgym.cached_folders import sync_folder
from agentsgym.errors import AgentsGymError, CheckpointError
from agentsgym.fields import is_int, is_number
from agentsgym.ranks import DeferredError, all_gather_objects

if TYPE_CHECKING:
    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.config import GRPOEnvConfig


class CheckpointWriter:
    """Writes the checkpoints of a run."""

    def __init__(self, trl: TRLInterface, args: GRPOEnvConfig, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._trl = trl
        self._args = args
        self._facts = facts
        self._error: DeferredError | None = None

    @contextlib.contextmanager
    def deferring_errors(self) -> Generator[None]:
        """While a checkpoint is being written, defer errors until all ranks can raise them together.

        An error raised immediately could leave other ranks waiting forever, since transformers synchronizes them.
        """
        if self._error is None:
            yield
        else:
            with self._error.capturing():
                yield

    def write(self, save: Callable[[], None], trial: Any = None) -> None:
        """Write a checkpoint under a temporary name, and rename it when it is complete. Collective.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier checkpoints are unchanged.
        """
        run_folder = Path(self._trl.run_folder(trial))
        place = run_folder / f"checkpoint-{self._trl.global_step}"
        unfinished = run_folder / UNFINISHED
        self._on_all_ranks(place, lambda: self._clear(unfinished))
        with self._trl.saving_into(unfinished):
            self._on_all_ranks(place, save)
            self._on_all_ranks(place, lambda: self._finish(unfinished / place.name, place))
        if self._args.push_to_hub:
            self._trl.push_checkpoint(place)

    def _on_all_ranks(self, place: Path, function: Callable[[], None]) -> None:
        """Call a function on every rank, and raise an error on all ranks if any rank raised one. Collective."""
        self._error = error = DeferredError()
        try:
            with error.capturing():
                function()
        finally:
            self._error = None
        first = error.first
        if first is not None and not isinstance(first, AgentsGymError):  # AgentsGymErrors are already full sentences
            cause: BaseException | None = first
            while cause is not None and not isinstance(cause, OSError):  # libraries may wrap it in an error of theirs
                cause = cause.__cause__ or cause.__context__
            reason = f"{type(first).__name__}: {first}" if cause is None else str(cause)
            first = CheckpointError(f"{place} could not be written: {reason}; earlier checkpoints are unchanged")
            first.__cause__ = error.first
        try:
            all_gather_objects((), first)
        except AgentsGymError as raised:
            self._clear(place.parent / UNFINISHED)  # frees the space on a full disk
            if type(raised) is AgentsGymError:  # raised by another rank
                raise CheckpointError(str(raised)) from raised
            raise

    def _clear(self, unfinished: Path) -> None:
        if self._args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _finish(self, folder: Path, place: Path) -> None:
        """Write the manifest of a checkpoint, flush it to disk, and rename it to its final name."""
        if not self._args.should_save:
            self._trl.record_best_checkpoint(place)
            return
        self._trl.record_best_checkpoint(place, folder)
        write_manifest(folder, **self._facts())
        _sync(folder)
        replaced = folder.with_name("replaced")
        if place.exists():  # the run was resumed from an earlier step; `finish_renames` recovers from a kill in between
            place.rename(replaced)
        try:
            folder.rename(place)
        except OSError:
            if replaced.exists():
                replaced.rename(place)
            raise
        shutil.rmtree(folder.parent, ignore_errors=True)
        sync_folder(place.parent)
        rotate_checkpoints(
            output_dir=str(place.parent),
            save_total_limit=self._args.save_total_limit,
            best_model_checkpoint=self._trl.best_checkpoint,
            use_mtime=True,
        )


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


MANIFEST: Final = "agentsgym_checkpoint.json"
UNFINISHED: Final = "_unfinished"  # pushes to the hub skip names with this prefix
_STATE: Final = "trainer_state.json"
_NAME: Final = re.compile(r"checkpoint-(\d+)")

_MAX_CHECKED: Final = 64 << 20  # larger files, in bytes, get no checksum


def checkpoint_step(folder: Path) -> int | None:
    """The optimizer step in the name of a checkpoint's folder; None if the folder is not a checkpoint."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, complete or not, newest first."""
    if not run_folder.is_dir():
        return []
    found = [folder for folder in run_folder.iterdir() if folder.is_dir() and checkpoint_step(folder) is not None]
    return sorted(found, key=lambda folder: checkpoint_step(folder) or 0, reverse=True)


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write the manifest of a checkpoint whose files are all in place: their sizes in bytes and checksums."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    checksums = {name: zlib.crc32((folder / name).read_bytes()) for name, size in files.items() if size <= _MAX_CHECKED}
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files, "crc32": checksums}, indent=1))


def read_manifest(folder: Path) -> Mapping[str, Any] | None:
    """Read a checkpoint's manifest, written by :func:`write_manifest`; None if it is missing or damaged."""
    manifest = _read_json(folder / MANIFEST)
    return manifest if isinstance(manifest, dict) and _is_manifest(manifest) else None


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    files, checksums = manifest.get("files"), manifest.get("crc32", {})
    if not all(isinstance(one, dict) and all(map(is_int(0), one.values())) for one in (files, checksums)):
        return False
    order, settings = manifest.get("order", {}), manifest.get("settings", {})
    if not isinstance(order, dict) or not isinstance(settings, dict):
        return False
    return not order or isinstance(settings.get("optim"), str)


def read_state(folder: Path) -> Mapping[str, Any]:
    """The trainer's state in a complete checkpoint, as transformers writes it; empty if the file is damaged."""
    state = _read_json(folder / _STATE)
    is_state = isinstance(state, dict) and is_int(0)(state.get("global_step")) and is_number(0)(state.get("epoch", 0))
    return state if is_state else {}


def _read_json(path: Path) -> Any:
    """Read a file of JSON; None if it is missing or damaged."""
    if not path.is_file():  # opening a named pipe would wait for ever
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def problem_with(folder: Path, max_steps: int | None = None) -> str | None:
    """Describe why a run cannot continue from a checkpoint, as the end of a sentence; None if it can.

    Args:
        folder: The checkpoint.
        max_steps: Total optimizer steps of the run: a checkpoint at the last step needs only the model. None if the
            run is to continue in any case.
    """
    return next(_problems(folder, max_steps), None)


def _problems(folder: Path, max_steps: int | None) -> Iterator[str]:
    manifest = read_manifest(folder)
    if manifest is None:
        yield f"{MANIFEST} is {'damaged' if (folder / MANIFEST).exists() else 'missing'}"
        return
    yield from _differences(folder, manifest)
    step = read_state(folder).get("global_step")
    if step is None:
        yield f"{_STATE} is damaged"
    elif manifest.get("save_only_model") and (max_steps is None or step < max_steps):
        yield "it was saved with save_only_model=True, so it contains the model but not the state of the run"


def _differences(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Describe the differences between the files and the manifest."""
    checksums = manifest.get("crc32", {})
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        elif name not in checksums and not _is_readable(path):
            yield f"{name} is damaged"
        elif name in checksums and zlib.crc32(path.read_bytes()) != checksums[name]:
            yield f"{name} is damaged: its checksum does not match"


def _is_readable(path: Path) -> bool:
    """Whether a large file of tensors, which has no checksum, seems whole, judged by its beginning or end."""
    if path.suffix in {".pt", ".pth", ".bin"}:
        return zipfile.is_zipfile(path)
    if path.suffix != ".safetensors":
        return True
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def finish_renames(run_folder: Path) -> None:
    """Rename checkpoints that were complete when the run was killed, just before they were renamed."""
    for folder in checkpoints_in(run_folder / UNFINISHED):
        place = run_folder / folder.name
        if not place.exists() and problem_with(folder) is None:
            folder.rename(place)
