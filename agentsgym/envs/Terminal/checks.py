"""Check an episode's folder: small predicates that read files with limits and follow no symbolic link."""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20
_MAX_UNPACKED_BYTES = 4 << 20


class Folder:
    """The working folder of an episode, whose content an agent has written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes | None:
        """Return the content of a regular file of at most 1 MB; None if there is none."""
        try:
            with os.fdopen(self._open(name), "rb") as file:
                content = file.read(_MAX_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
        except OSError:
            return None
        return None if content is None or len(content) > _MAX_BYTES else content

    def mode(self, name: str) -> int | None:
        """Return the permissions of a file; None if there is none."""
        try:
            return stat.S_IMODE((self._path / name).lstat().st_mode)
        except OSError:
            return None

    def _open(self, name: str) -> int:
        """Open a file; a symbolic link in its path raises ``OSError``, and a pipe does not block."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._path, os.O_RDONLY)
        for part in name.split("/"):
            try:
                opened = os.open(part, flags, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = opened
        return descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class HasText:
    """A file has this text, apart from white space at the ends of lines and of the file.

    Attributes:
        path: The file.
        text: Its text.
        gone: A path at which nothing may be left; empty for none.
    """

    path: str
    text: str
    gone: str = ""

    def holds(self, folder: Folder) -> bool:
        """Whether the file has the text."""
        content = folder.read(self.path)
        if content is None or (self.gone and folder.mode(self.gone) is not None):
            return False
        return _lines(content.decode(errors="replace")) == _lines(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HasMode:
    """A file has these permissions."""

    path: str
    mode: int

    def holds(self, folder: Folder) -> bool:
        """Whether the file has the permissions."""
        return folder.mode(self.path) == self.mode


@dataclass(frozen=True, slots=True, kw_only=True)
class HasArchive:
    """A file is a tar archive, compressed by gzip, with exactly these files.

    Attributes:
        path: The archive.
        files: The texts of the files in it.
    """

    path: str
    files: Mapping[str, str]

    def holds(self, folder: Folder) -> bool:
        """Whether the archive has the files."""
        content = folder.read(self.path)
        try:
            return content is not None and self._unpacked(content) == self.files
        except Exception:  # noqa: BLE001  # the agent made the archive, which may be damaged in any way
            return False

    def _unpacked(self, content: bytes) -> dict[str, str]:
        unpacker = zlib.decompressobj(wbits=31)
        found: dict[str, str] = {}
        with tarfile.open(fileobj=io.BytesIO(unpacker.decompress(content, _MAX_UNPACKED_BYTES)), mode="r:") as archive:
            for member in archive:
                if len(found) > len(self.files):
                    break
                if (file := archive.extractfile(member) if member.isreg() else None) is not None:
                    found[posixpath.normpath(member.name)] = file.read(_MAX_BYTES).decode(errors="replace")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """A function in a Python file returns the expected values; each call counts as one check.

    Attributes:
        path: The file.
        function: The function's name.
        calls: The arguments of each call.
        expected: The value that each call must return.
    """

    path: str
    function: str
    calls: Sequence[Sequence[Any]]
    expected: Sequence[Any]


Check = HasText | HasMode | HasArchive


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
