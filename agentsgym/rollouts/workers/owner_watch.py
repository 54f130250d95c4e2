"""Make a worker exit when the process that owns its pool is gone, even while a step hangs.

A thread in the worker waits until the owner exits or the connection closes. It then signals the worker to close its
episodes, and forces it to exit after ``_CLOSING_S``. A step that holds the GIL blocks that thread too. This case is
covered only on Linux: the kernel kills the worker when its parent, the fork server, exits because the owner did.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from agentsgym.rollouts.workers.wire import KILL_SIGNAL
from agentsgym.supervisor import DEATH_SIGNAL, IS_LINUX, control

_POLL_S = 1.0
_CLOSING_S = 2.0
LOST_CONNECTION = 70  # exit code if code in the worker broke its connection (EX_SOFTWARE in sysexits.h)


def exit_with_owner(connection: socket.socket, owner: int) -> None:
    """Start watching the owner and the connection."""
    # Close this process's copy of the pipe that keeps the fork server alive, so that only the owner keeps it.
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pipe = getattr(server, "_forkserver_alive_fd", None)
    if server is not None and isinstance(pipe, int):
        server._forkserver_alive_fd = None  # not needed: a worker is daemonic, so it cannot start processes
        with suppress(OSError):
            os.close(pipe)
    if IS_LINUX:
        with suppress(OSError, AttributeError):
            control(DEATH_SIGNAL, signal.SIGKILL)
    if hasattr(select, "poll"):  # not on Windows
        process: int | None = None
        with suppress(OSError, AttributeError):  # pidfd_open requires Linux 5.3
            process = os.pidfd_open(owner)
        descriptors = (connection.fileno(), process)
        identities = tuple(None if one is None else _identity(one) for one in descriptors)
        threading.Thread(
            target=_watch, args=(owner, descriptors, identities), name="agentsgym-owner-watch", daemon=True
        ).start()


def _watch(owner: int, descriptors: tuple[int, int | None], identities: tuple[object, ...]) -> None:
    """Wait until the owner exits or the connection closes, and exit this process.

    Args:
        owner: Process id of the owner.
        descriptors: File descriptors of the connection and of the owner's process; None for the latter if unknown.
        identities: Device and inode of each descriptor at the start, to detect that it was closed or now refers to
            another file.
    """
    connection, process = descriptors
    while True:
        if _identity(connection) != identities[0]:
            os._exit(LOST_CONNECTION)  # something closed the file descriptors of this process
        is_process_known = process is not None and _identity(process) == identities[1]
        if _is_owner_gone(owner, connection, process if is_process_known else None):
            break
        poll = select.poll()
        poll.register(connection, getattr(select, "POLLRDHUP", 0))  # hang-ups and errors are always reported
        if process is not None:
            poll.register(process, select.POLLIN)
        poll.poll(1000 * _POLL_S)
    if KILL_SIGNAL is not None:
        os.kill(os.getpid(), KILL_SIGNAL)
    time.sleep(_CLOSING_S)
    os._exit(1)


def _is_owner_gone(owner: int, connection: int, process: int | None) -> bool:
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))
    if poll.poll(0):
        return True
    if process is not None:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    try:
        os.kill(owner, 0)
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
