"""Decide which training run a folder holds, continue it, and lock the folder against other processes.

A training run that is resumed keeps its name. The rollouts that it plays again replace those of the attempt that ended:
the files of these are renamed, so that no reader mixes the two, and nothing is deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from agentsgym.cached_folders import replacing
from agentsgym.errors import ConfigError
from agentsgym.store.parts import SUFFIX, Part, encode, fcntl, read_row_group, scan
from agentsgym.store.schema import Table
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_MAX_NAMED: Final = 5
_held: set[Path] = set()  # by this process


def new_run_name(kind: str = "training") -> str:
    """Return a unique name for a run."""
    return f"{kind}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"


def check_one_run(rollouts: Table, what: str) -> None:
    """Raise :class:`ConfigError`, which names the runs, if rollouts are of several, which must not be mixed."""
    names = [*filter(None, dict.fromkeys(rollouts.column("run").to_pylist()))]
    if len(names) > 1:
        listed = ", ".join(map(repr, names[:_MAX_NAMED])) + ", …" * (len(names) > _MAX_NAMED)
        raise ConfigError(f"{what} of {len(names)} runs: choose one with the column run, from {listed}")


def claim(
    store: Path | None,
    run: str = "",
    is_played_again: Callable[[Mapping[str, Any]], bool] | None = None,
    *,
    output: Path | None = None,
    overwrite: bool = False,
) -> str:
    """Return the name of a training run, and prepare its folders: for a new run, or for one that is resumed.

    Args:
        store: The folder of the rollout store, if there is one; it may not exist yet.
        run: The name of the run; empty for a new name, or that of the newest run in the store.
        is_played_again: For a resumed run, decides by the columns ``source``, ``group`` and ``step`` which rollouts are
            taken out of the store; their files stay, with the ending ``.superseded``. None for a new run.
        output: The output folder of the run.
        overwrite: Whether folders that hold another run are moved to ``NAME.1``; otherwise a new run is refused.

    Raises:
        ConfigError: A new run is refused, or another process is training into one of the folders.
    """
    parts = scan(store)[0] if store is not None and store.is_dir() else []
    pairs = ((str(row["run"]), row["source"]) for part in parts for row in _read(part, ["run", "source"]).to_pylist())
    # An attempt that ended before training has only evaluations, but under such a name.
    known = [*dict.fromkeys(name for name, source in pairs if "training" in {source, name.partition("-")[0]})]
    if is_played_again is None:
        files = [] if output is None else [*output.glob("summary.json"), *output.glob("checkpoint-*")]
        _make_room(output, [file.name for file in files], overwrite=overwrite)
        _make_room(store, [name for name in known if name != run], overwrite=overwrite)
        return run or new_run_name()
    run = run or (known or [new_run_name()])[-1]
    with contextlib.ExitStack() as stack:
        for folder in filter(None, (output, store)) if parts else ():
            stack.enter_context(held(folder))
        for part in parts:
            rows = _read(part, ["run", "source", "group", "step"]).to_pylist()
            _supersede(part, [row["run"] == run and is_played_again(row) for row in rows])
    return run


def _make_room(folder: Path | None, found: Sequence[str], *, overwrite: bool) -> None:
    """Refuse a folder in which a run was found, or move it aside."""
    if folder is None or not found or not folder.exists():  # a store may have been moved with the output folder
        return
    if not overwrite:
        raise ConfigError(
            f"{folder} holds a run already ({', '.join(found[:_MAX_NAMED])}): train into another folder, resume that "
            "run with resume_from_checkpoint, or move it aside (on the command line with --overwrite, in "
            "agentsgym.train and TrainingRun with overwrite=True)"
        )
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder} holds a run, and cannot be moved aside because it is the working directory")
    others = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    with held(folder):
        other = folder.rename(next(one for one in others if not one.exists()))
    logger.warning("%s was moved to %s", folder, other)


def _supersede(part: Part, is_superseded: Sequence[bool]) -> None:
    """Take rows out of a file, so that a reader finds all of its rows, or only the others, whenever this ends."""
    superseded = part.path.with_name(f"{part.path.name}.superseded")
    if all(is_superseded):
        part.path.rename(superseded)
    elif any(is_superseded):
        others = encode(_read(part).filter(pa.array([not one for one in is_superseded])))
        shutil.copyfile(part.path, superseded)
        # Under a name without a number of rollouts, which would be wrong as soon as the content is replaced.
        with replacing(part.path.rename(part.path.with_name(f"{part.path.stem}-kept{SUFFIX}"))) as file:
            file.write(others)


@contextlib.contextmanager
def held(folder: Path) -> Generator[None]:
    """Keep other processes from training into a folder, which is created; a killed process no longer holds it.

    Raises:
        ConfigError: Another process trains into it, or it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {sentence_of(error)}") from error
    if fcntl is None or (path := folder.resolve()) in _held:  # Windows; a store in the folder of its run
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"another process is training into {folder}: wait until it ends, or use another folder"
            raise ConfigError(text) from error
        except OSError:
            logger.warning("%s cannot be locked: do not train into it twice at the same time", folder)
        _held.add(path)
        yield
    finally:
        _held.discard(path)
        os.close(descriptor)


def _read(part: Part, columns: Sequence[str] | None = None) -> Table:
    return pa.concat_tables([read_row_group(part, index, columns) for index in range(len(part.row_groups))])
