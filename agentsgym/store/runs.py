"""Tell the runs of a rollout store apart, continue one of them, and lock its folder against other processes.

A training run that is resumed keeps its name. The rollouts that it plays again replace those of the attempt that ended:
the files of these are renamed, so that no reader mixes the two, and nothing is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from agentsgym.errors import ConfigError
from agentsgym.store.parts import encode, fcntl, part_name, read_row_group, scan, write_part
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

SUPERSEDED: Final = ".superseded"
"""The end of the names of files whose rollouts were played again."""

_COLUMNS: Final = ("run", "source", "agent", "step")
_MAX_NAMED: Final = 5
_held: set[Path] = set()  # by this process


def check_one_run(runs: Iterable[str | None], what: str) -> None:
    """Raise if rollouts are of several runs, which must not be mixed.

    Raises:
        ConfigError: They are; the message names the runs.
    """
    names = [name for name in dict.fromkeys(runs) if name is not None]
    if len(names) > 1:
        listed = ", ".join(map(repr, names[:_MAX_NAMED])) + ", …" * (len(names) > _MAX_NAMED)
        raise ConfigError(f"{what} of {len(names)} runs: choose one with the column run, from {listed}")


def training_runs(folder: Path) -> list[str]:
    """Return the names of the training runs in a store, oldest first; empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    rows = [row for part in scan(folder)[0] for row in _read(part, _COLUMNS).to_pylist()]
    return [*dict.fromkeys(str(row["run"]) for row in rows if row["source"] == "training")]


def check_unused(folder: Path, marks: Iterable[object]) -> None:
    """Raise if a folder holds a run, of which ``marks`` are the names or files, before another one begins there.

    Raises:
        ConfigError: It does; the message names the remedies.
    """
    if found := [*map(str, marks)]:
        raise ConfigError(
            f"{folder} holds a run already ({', '.join(found[:_MAX_NAMED])}): train into another folder, resume that "
            "run with resume_from_checkpoint, or move it aside (agentsgym train --overwrite)"
        )


def supersede(folder: Path, is_superseded: Callable[[dict[str, Any]], bool]) -> None:
    """Take rollouts out of a store that are going to be played again; their files stay, under other names.

    Args:
        folder: The folder of the store; nothing is done if it does not exist.
        is_superseded: Decides by a rollout's ``run``, ``source``, ``agent`` and ``step``.
    """
    for part in scan(folder)[0] if folder.is_dir() else ():
        kept = [not is_superseded(row) for row in _read(part, _COLUMNS).to_pylist()]
        if all(kept):
            continue
        table = _read(part, None).filter(pa.array(kept)) if any(kept) else None
        part.path.rename(part.path.with_name(part.path.name + SUPERSEDED))
        if table is not None:
            write_part(folder, part_name(secrets.token_hex(6), 1, len(table)), encode(table))


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
    _held.add(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        _held.discard(path)
        os.close(descriptor)
        text = f"another process is training into {folder}: wait until it ends, or use another folder"
        raise ConfigError(text) from error
    except OSError:
        logger.warning("%s cannot be locked: do not train into it twice at the same time", folder)
    try:
        yield
    finally:
        _held.discard(path)
        os.close(descriptor)


def move_aside(folder: Path) -> None:
    """Rename a folder to ``NAME.1``, or with the next free number; nothing is done if it does not exist."""
    number = 1
    while (other := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    if folder.exists():
        folder.rename(other)
        logger.warning("%s was moved to %s", folder, other)


def _read(part: Any, columns: Any) -> pa.Table:
    return pa.concat_tables([read_row_group(part, index, columns) for index in range(len(part.row_groups))])
