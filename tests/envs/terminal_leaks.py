"""Whether shells of the terminal leave something: their folders and processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use another folder for temporary files, and fail if a folder or a process is left in the end."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # so that other users can reach what is in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert not [*Path(folder).iterdir()]
    lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True) if is_alive(child)]
    assert not [line for line in lines if "launch.py" in line or "_command" in line]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is neither gone nor waited for."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
