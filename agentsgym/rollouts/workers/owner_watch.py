"""Let a worker end when the process that owns its pool is gone, also while a step hangs.

A thread of the worker waits for the end of the owner, and for that of the connection. It then has the worker close its
episodes, and ends it by force after ``_CLOSING_S``. A step that holds the interpreter's lock stops that thread as well;
for it there is the kernel, on Linux alone: it kills a worker with the fork server, which ends with the owner.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from agentsgym.rollouts.workers.wire import KILL_SIGNAL

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0
_CLOSING_S = 2.0
LOST_CONNECTION = 70  # the exit code of a worker whose end of the connection is gone, as EX_SOFTWARE of sysexits.h


def end_with_owner(connection: socket.socket, owner: int) -> None:
    """Start to watch.

    Args:
        connection: The worker's end.
        owner: The owner's process id.
    """
    # Close this process's copy of the pipe that keeps the fork server alive, so that only the owner keeps it.
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if server is not None and isinstance(pipe, int):
        server._forkserver_alive_fd = None  # nothing here starts processes by it: a worker is a daemon
        with suppress(OSError):
            os.close(pipe)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if hasattr(select, "poll"):  # not on Windows
        watch = _Watch(connection.fileno(), owner)
        threading.Thread(target=watch.run, name="agentsgym-owner-watch", daemon=True).start()


class _Watch:
    """The resources that are watched."""

    def __init__(self, descriptor: int, owner: int) -> None:
        self._descriptor = descriptor
        self._identity = _identity(descriptor)
        self._owner = owner
        self._process: int | None = None
        with suppress(OSError, AttributeError):  # pidfd_open is Linux's, and newer than some kernels
            self._process = os.pidfd_open(owner)
        self._process_identity = None if self._process is None else _identity(self._process)

    def run(self) -> None:
        """Wait until either is gone."""
        while True:
            if _identity(self._descriptor) != self._identity:
                os._exit(LOST_CONNECTION)  # something closed the file descriptors of this process
            if self._is_owner_gone():
                break
            poll = select.poll()
            poll.register(self._descriptor, getattr(select, "POLLRDHUP", 0))  # hang-ups and errors are always reported
            if self._process is not None:
                poll.register(self._process, select.POLLIN)
            poll.poll(1000 * _POLL_S)
        if KILL_SIGNAL is not None:
            os.kill(os.getpid(), KILL_SIGNAL)
        time.sleep(_CLOSING_S)
        os._exit(1)

    def _is_owner_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, getattr(select, "POLLRDHUP", 0))
        if poll.poll(0):
            return True
        if self._process is not None and _identity(self._process) == self._process_identity:
            poll = select.poll()
            poll.register(self._process, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self._owner, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
