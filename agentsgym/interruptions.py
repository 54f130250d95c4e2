"""Distinguish interruptions of a run from exceptions of user code.

A hook of an environment or an agent may raise anything, even ``SystemExit`` or ``GeneratorExit``, and only its episode
fails. Interruptions merely pass through user code: Ctrl-C, exceptions raised by signal handlers, and the library's
:class:`Interruption`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class Interruption(BaseException):
    """Ends the run wherever it is raised; no episode counts as failed."""


class Terminated(Interruption):
    """The process received SIGTERM."""


@contextlib.contextmanager
def raising_on_sigterm() -> Generator[None]:
    """Raise :class:`Terminated` in the ``with`` block at the first SIGTERM, to save finished work; ignore later ones.

    Does nothing outside the main thread, or if SIGTERM already has a handler.
    """
    owner, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handle(number: int, _: object) -> None:
        if os.getpid() != owner:  # a forked child, which has nothing to save
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        signal.signal(number, signal.SIG_IGN)  # launchers send duplicates, which must not interrupt saving
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_EXITING = "the process exits"


def process_exit() -> SystemExit:
    """Make an exception that ends a thread because its process exits; Python prints no traceback for this type."""
    error = SystemExit()
    error.add_note(_EXITING)
    return error


def is_interruption(error: BaseException) -> bool:
    """Whether an error that passed through user code is an interruption, which must be re-raised.

    >>> is_interruption(KeyboardInterrupt()), is_interruption(SystemExit())
    (True, False)
    """
    if isinstance(error, KeyboardInterrupt | Interruption) or _EXITING in vars(error).get("__notes__", ()):
        return True
    if isinstance(error, Exception):  # e.g. TimeoutError, raised by an alarm handler that a hook installed
        return False
    # Python may run a signal handler in the middle of any code, including a hook.
    handlers: set[Any] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = cast("Any", handler).func
        function = getattr(handler, "__func__", handler)  # of a method
        handlers.add(getattr(function, "__code__", None))
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def attempt(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | BaseException:
    """Call a function that runs user code; return its result, or what it raised unless that is an interruption.

    >>> attempt(int, "seven")
    ValueError("invalid literal for int() with base 10: 'seven'")
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if is_interruption(error):
            raise
        return error
