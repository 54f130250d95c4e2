"""Start commands, each as a process group that ends with all its descendants (see :mod:`agentsgym.supervisor`)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PYTHON = os.path.realpath(sys.executable)
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))


class ProcessGroup:
    """A command and all processes that it starts, which receive no signals from the terminal.

    They end when the command exits, on :meth:`end`, when this object is garbage-collected, and when this process ends
    for any reason. In a forked process, this object has no effect. The process that is returned at the start is the
    supervisor, whose exit code is that of the command, and which outlives all others.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: Mapping[str, int | None] | None = None,
        grace_s: float = 0.0,
        script: str = _SUPERVISOR,
        **settings: Any,
    ) -> None:
        """Set up the group; :meth:`start` or :meth:`start_on_loop` starts it.

        Args:
            command: The program and its arguments.
            limits: The limits of each process by their names in :mod:`resource`; None for no limit.
            grace_s: The time in seconds between SIGTERM and SIGKILL; 0 to kill at once.
            script: The supervisor, which calls :func:`~agentsgym.supervisor.supervise`.
            **settings: Further settings of the supervisor, such as the ``environment`` of the command.
        """
        limits = {name: limit for name, limit in (limits or {}).items() if limit is not None}
        self._command, self._script = command, script
        self._settings: dict[str, Any] = {"environment": None, **settings, "limits": limits, "grace_s": grace_s}
        self._lifeline, self._supervisors = socket.socketpair()
        self._pid: int | None = None
        self.end = weakref.finalize(self, _end, self._lifeline)
        _lifelines.add(self._lifeline)

    @property
    def pid(self) -> int | None:
        """The id of the command's process, after a wait for its start; None if it did not start or has been ended."""
        with suppress(OSError):
            self._pid = self._pid or int.from_bytes(self._lifeline.recv(4)) or None
        return self._pid

    def start(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, **pipes: Any) -> Any:
        """Start the command, and return its :class:`subprocess.Popen`; the arguments are those of that class.

        Raises:
            OSError: The command does not exist or cannot be executed.
        """
        with self._starting(cwd, env) as (command, options):
            return subprocess.Popen(command, cwd=cwd, env=env, **options, **pipes)

    async def start_on_loop(self, *, cwd: str, env: Mapping[str, str], **pipes: Any) -> asyncio.subprocess.Process:
        """Start the command as :meth:`start` does, for a coroutine."""
        with self._starting(cwd, env) as (command, options):
            return await asyncio.create_subprocess_exec(*command, cwd=cwd, env=env, **options, **pipes)

    @contextmanager
    def _starting(self, cwd: str | None, env: Mapping[str, str] | None) -> Generator[tuple[list[str], dict[str, Any]]]:
        descriptor, program = self._supervisors.fileno(), self._command[0]
        place = str(Path(cwd or ".", program)) if "/" in program else program
        with self._supervisors:
            if shutil.which(place, path=(self._settings["environment"] or env or os.environ).get("PATH")) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
            settings = json.dumps({**self._settings, "lifeline": descriptor})
            command = [_PYTHON, "-I", "-S", self._script, settings, *self._command]
            yield command, {"pass_fds": (descriptor,), "start_new_session": True}


def kill_group(leader: int) -> None:
    """Kill the process group that a process leads, if it leads one; does nothing on Windows."""
    with suppress(OSError, AttributeError):
        os.killpg(leader, signal.SIGKILL)


_lifelines: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _end(lifeline: socket.socket) -> None:
    with suppress(OSError):  # the group has ended
        lifeline.shutdown(socket.SHUT_RDWR)
    lifeline.close()


def _forget() -> None:
    """Close the lifelines in a forked process, which would otherwise keep the groups alive, or end them."""
    for lifeline in _lifelines:
        lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
