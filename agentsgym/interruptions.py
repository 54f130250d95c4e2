"""Distinguish interruptions of a run from exceptions of foreign code.

A hook of an environment and an agent may raise anything, ``SystemExit`` and ``GeneratorExit`` included, which fails
their own episode. Interruptions only pass through them: Ctrl-C, a signal handler that raises, and the library's own
:class:`Interruption`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import traceback
from collections.abc import Generator
from typing import Any, cast


class Interruption(BaseException):
    """Ends the run from any code in which it is raised; no episode counts as failed."""


class Terminated(Interruption):
    """The process received SIGTERM."""


@contextlib.contextmanager
def raising_on_sigterm() -> Generator[None]:
    """Raise :class:`Terminated` inside at the first SIGTERM, so that finished work can be kept; ignore later ones.

    Does nothing outside the main thread, or if the signal has a handler already.
    """
    owner, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handle(number: int, _: object) -> None:
        if os.getpid() != owner:  # a forked child, which has nothing to keep
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)  # launchers send copies, which must not end the writing
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_EXITING = "the process exits"


def process_exit() -> SystemExit:
    """Make the exception that ends a thread of a process that exits: Python prints no traceback for this type."""
    error = SystemExit()
    error.add_note(_EXITING)
    return error


def is_interruption(error: BaseException) -> bool:
    """Whether an error that passed through foreign code is an interruption, which must be raised again.

    >>> is_interruption(KeyboardInterrupt()), is_interruption(SystemExit())
    (True, False)
    """
    if isinstance(error, KeyboardInterrupt | Interruption) or _EXITING in vars(error).get("__notes__", ()):
        return True
    if isinstance(error, Exception):  # as TimeoutError, which the handler of a hook's alarm may raise
        return False
    # Python runs the handler of a signal in the midst of any code, a hook's too.
    handlers: set[Any] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = cast("Any", handler).func
        handlers.add(getattr(getattr(handler, "__func__", handler), "__code__", None))  # of a method, its function's
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
