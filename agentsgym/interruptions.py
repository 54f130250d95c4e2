"""Tell what ends a run from outside apart from what foreign code raises.

A hook of an environment and an agent may raise anything, ``SystemExit`` and ``GeneratorExit`` included, and each such
fault is its own episode's. What comes from outside only passes through them: Ctrl-C, a handler of a signal that raises,
and the library's own :class:`Interruption`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Generator
from types import CodeType
from typing import Any


class Interruption(BaseException):
    """Ends what runs, through whatever code it is raised in; no episode's fault."""


class Terminated(Interruption):
    """SIGTERM came."""


@contextlib.contextmanager
def raising_on_sigterm() -> Generator[None]:
    """Raise :class:`Terminated` inside at the first SIGTERM, so that what is finished can be kept; pass over others.

    Nothing is changed on another thread than the main one, and where somebody handles the signal already.
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
    """Make what ends a thread of a process that exits: Python writes no traceback of exactly this type."""
    error = SystemExit()
    error.add_note(_EXITING)
    return error


def is_interruption(error: BaseException) -> bool:
    """Whether an error that passed through foreign code is not its own, and must be raised again.

    >>> is_interruption(KeyboardInterrupt()), is_interruption(SystemExit())
    (True, False)
    """
    if isinstance(error, KeyboardInterrupt | Interruption) or _EXITING in vars(error).get("__notes__", ()):
        return True
    return not isinstance(error, Exception) and _is_of_signal_handler(error)


def _is_of_signal_handler(error: BaseException) -> bool:
    """Whether it was raised in a handler that is installed: Python runs it in the midst of any code, a hook's too.

    (An ``Exception`` is not inspected: a hook may set its own alarm, whose handler raises TimeoutError.)
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    function = getattr(handler, "__func__", handler)  # of a method
    return getattr(function, "__code__", None)
