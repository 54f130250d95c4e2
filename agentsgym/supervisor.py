"""Run a program with limits, and end it with all its descendants; run as a script with the standard library.

The process that runs this script stays until the program and its descendants have ended. It ends them when the program
exits, when it receives SIGTERM, and when the other end of its lifeline, a socket, requests it or is closed, as it is
when the process that started this one ends. Linux hands orphans to this process. In a new PID namespace, the program is
process 1, so the kernel kills everything with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DEATH_SIGNAL, _SUBREAPER = 1, 36  # of <sys/prctl.h>
_STUCK_S = 30  # the kernel may be unable to kill a process, for example on a lost network drive
_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE)
IS_LINUX = sys.platform == "linux"


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, whose errors are kept."""
    return ctypes.CDLL(None, use_errno=True)


def control(option: int, value: int) -> int:
    """Call ``prctl``."""
    return libc().prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0)))


def supervise(program: Sequence[str], settings: Mapping[str, Any], enter: Callable[[], object] = lambda: None) -> int:
    """Run a program, and return its exit status; a signal that ended it ends this process as well.

    Args:
        program: The program and its arguments.
        settings: ``lifeline``, a file descriptor; ``grace_s``, the time between SIGTERM and SIGKILL, 0 to kill
            at once; ``limits`` by their names in :mod:`resource`; and ``environment``, None for that of this process.
        enter: Called in the new process before it becomes the program.
    """
    lifeline: int = settings["lifeline"]
    os.set_inheritable(lifeline, False)
    if IS_LINUX:
        control(_SUBREAPER, 1)
    signals, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, _ignore)  # `signals` receives their numbers
    signal.set_wakeup_fd(write_end)
    child = os.fork()
    if child == 0:
        _become(program, settings, enter)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    with contextlib.suppress(OSError):  # the other end is closed
        os.write(lifeline, child.to_bytes(4))
    status = _wait(child, lifeline, signals, settings["grace_s"])
    _exit_if_stuck()
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    _kill_orphans()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _limit({"RLIMIT_CORE": 0})
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _ignore(_signal: int, _frame: object) -> None:
    """Do nothing, unlike SIG_IGN, with which no signal would arrive."""


def _become(program: Sequence[str], settings: Mapping[str, Any], enter: Callable[[], object]) -> None:
    """Replace this process by the program."""
    for number in _DEFAULT_SIGNALS:  # the process that started this one may ignore them
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    enter()
    if IS_LINUX:
        control(DEATH_SIGNAL, signal.SIGKILL)
    _limit(settings["limits"])
    os.execvpe(program[0], [*program], settings["environment"] or os.environ)


def _limit(limits: Mapping[str, int]) -> None:
    import resource  # noqa: PLC0415  # Windows has none, and must be able to import this module

    for name, value in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError, OverflowError):  # not known, or too high, here
            resource.setrlimit(getattr(resource, name), (value, value))


def _wait(child: int, lifeline: int, signals: int, grace_s: float) -> int:
    """Wait for the program, which is ended on request, and return its status."""
    watched = [signals, lifeline]
    while True:
        ready = select.select(watched, [], [])[0]
        numbers = os.read(signals, 4096) if signals in ready else b""
        process = None
        while process != 0:  # all processes that have ended are collected
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == child:
                return status
        is_requested = lifeline in ready or signal.SIGTERM in numbers
        if signal.SIGALRM in numbers or (is_requested and not grace_s):
            watched = [signals]
            _exit_if_stuck()
            _send(signal.SIGKILL, child, child)
        elif is_requested:
            watched = [signals]
            signal.setitimer(signal.ITIMER_REAL, grace_s)
            _send(signal.SIGTERM, child, child)


def _exit_if_stuck() -> None:
    """Let the kernel end this process if what it kills does not end."""
    signal.alarm(_STUCK_S)  # instead of the timer, which may still run
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _send(number: int, process: int, group: int) -> None:
    """Send a signal to a process group or, if that is the group of this process or does not exist, to a process."""
    try:
        if group != os.getpgid(0):
            os.killpg(group, number)
            return
    except OSError:
        pass
    with contextlib.suppress(OSError):
        os.kill(process, number)


def _kill_orphans() -> None:
    """Kill all descendants: those whose parent is killed become children of this process (on Linux)."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists():
        for process in map(int, children.read_text(encoding="ascii").split()):
            with contextlib.suppress(OSError):
                _send(signal.SIGKILL, process, os.getpgid(process))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[2:], json.loads(sys.argv[1])))
