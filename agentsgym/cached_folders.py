"""Write files and folders atomically; cached folders are checksummed, and safe for concurrent processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"


def cache_folder(name: str, path: str | None = None) -> Path:
    """Return the folder for one kind of results: ``path``, or if it is None, ``agentsgym/name`` in the user's cache."""
    if path is not None:
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentsgym" / name


def is_intact(folder: Path, what: str) -> bool:
    """Whether a cached folder exists and its files are unchanged; a damaged folder is removed, with a warning.

    Args:
        folder: The folder that was passed to :func:`write_folder`.
        what: The name of its contents in the warning, such as ``"the index"``.
    """
    if not folder.is_dir():
        return False
    try:
        expected = cast("dict[str, str]", json.loads((folder / _MANIFEST).read_text()))
        found = {name: _checksum(folder / name) for name in expected}
        if found != expected or not expected:
            raise ValueError("its checksums differ")  # noqa: TRY301  # any damage leads to a rebuild
    except Exception as error:  # noqa: BLE001  # a damaged file may raise anything
        remove_damaged(folder, what, error)
        return False
    return True


def remove_damaged(folder: Path, what: str, error: BaseException) -> None:
    """Remove an unusable folder, with a warning that includes the reason."""
    logger.warning("%s in %s is damaged and will be rebuilt: %s", what, folder, sentence_of(error))
    shutil.rmtree(folder, ignore_errors=True)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder atomically; if another process has already written it, that folder is kept.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        unfinished = Path(temporary) / "unfinished"
        unfinished.mkdir()
        write(unfinished)
        checksums = {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}
        (unfinished / _MANIFEST).write_text(json.dumps(checksums))
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise  # otherwise another process has already written the same contents


@contextmanager
def replacing(path: Path, *, is_synced: bool = True) -> Generator[IO[bytes]]:
    """Open a temporary file, which is synced to disk and renamed to ``path`` at the end of the block.

    Args:
        path: The file.
        is_synced: False for a file whose loss costs little, since waiting for the disk may take milliseconds.

    Raises:
        OSError: The file cannot be written; no partial file remains.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
