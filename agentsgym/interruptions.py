"""Tell what ends a run from outside apart from what foreign code raises.

A hook of an environment and an agent may raise anything, ``SystemExit`` and ``GeneratorExit`` included, and each such
fault is its own episode's. What comes from outside only passes through them: Ctrl-C, a handler of a signal that raises,
and the library's own :class:`Interruption`.
"""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any


class Interruption(BaseException):
    """Ends what runs, through whatever code it is raised in; no episode's fault."""


_EXITING = "the process exits"


def process_exit() -> SystemExit:
    """Make what ends a thread of a process that exits: Python writes no traceback of exactly this type."""
    error = SystemExit()
    error.add_note(_EXITING)
    return error


def is_interruption(error: BaseException) -> bool:
    """Whether an error that foreign code let through is not its own: it is to be raised again.

    >>> is_interruption(KeyboardInterrupt()), is_interruption(SystemExit())
    (True, False)
    """
    if isinstance(error, KeyboardInterrupt | Interruption) or _EXITING in vars(error).get("__notes__", ()):
        return True
    return not isinstance(error, Exception) and _is_of_signal_handler(error)


def _is_of_signal_handler(error: BaseException) -> bool:
    """Whether it was raised in a handler that is installed: Python runs it in the midst of any code, a hook's too.

    (What is an ``Exception`` is not looked at: a hook may set an alarm of its own, whose handler raises TimeoutError.)
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
