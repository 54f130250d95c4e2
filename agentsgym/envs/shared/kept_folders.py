"""Keep what was costly to make in folders on disk: whole or not at all, checksummed, for many processes at once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"


def cache_folder(name: str, given: str | None = None) -> Path:
    """Give the folder where things of a kind are kept: the one that is named, else ``agentsgym/name`` in the cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentsgym" / name


def is_whole(folder: Path, what: str) -> bool:
    """Whether everything that was kept in a folder is still as it was; a damaged one is removed, with a warning.

    Args:
        folder: As it was given to :func:`keep`.
        what: What is kept there, for the warning: ``"the index"``.
    """
    if not folder.is_dir():
        return False
    try:
        expected = cast("dict[str, str]", json.loads((folder / _MANIFEST).read_text()))
        found = {name: _checksum(folder / name) for name in expected}
        if found != expected or not expected:
            raise ValueError("its checksums differ")  # noqa: TRY301  # damaged in whatever way, it is made anew
    except Exception as error:  # noqa: BLE001  # a damaged file may raise anything
        remove_damaged(folder, what, error)
        return False
    return True


def remove_damaged(folder: Path, what: str, error: BaseException) -> None:
    """Remove a folder that cannot be used, with a warning that says why."""
    logger.warning("%s in %s cannot be used and is made anew: %s", what, folder, sentence_of(error))
    shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder, whole or not at all; where another process was faster, its folder stays.

    Args:
        folder: Where it is to stand.
        write: Writes the files into the empty folder that it is given.

    Raises:
        OSError: The disk does not take it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as made:
        unfinished = Path(made) / "unfinished"
        unfinished.mkdir()
        write(unfinished)
        checksums = {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}
        (unfinished / _MANIFEST).write_text(json.dumps(checksums))
        with suppress(FileExistsError):
            _move(unfinished, folder)


def _move(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise  # else another process was faster, and what it made is the same


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
