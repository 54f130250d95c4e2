"""Run a check within a time limit, and find the line that is running when it is exceeded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from agentsgym.errors import ConfigError
from agentsgym.fields import is_seconds, require
from agentsgym.interruptions import Interruption

_REPEAT_S = 1.0  # seconds between repetitions, for hooks that catch all exceptions


class OutOfTimeError(Interruption):
    """The time limit was exceeded: an interruption, so that it is not recorded as an episode's failure.

    Attributes:
        place: File and line that were running at that moment.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


@contextmanager
def time_limit(limit_s: float | None) -> Generator[None]:
    """Raise an exception inside the block when a time limit is exceeded; None for no limit.

    A signal handler raises it, as for Ctrl-C: this ends sleeping, waiting and Python loops, but not a computation in C.
    """
    if limit_s is None:
        yield
        return
    require("limit_s", limit_s, is_seconds, "a positive number or None")
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise ConfigError("limit_s needs a timer signal, which is available only in the main thread of a Unix process")

    def stop(_: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None and caller.f_code.co_filename == threading.__file__:  # waits inside the library
            caller = caller.f_back
        caller = caller or frame
        raise OutOfTimeError("" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}")

    handler = signal.signal(signal.SIGALRM, stop)
    before = signal.setitimer(signal.ITIMER_REAL, limit_s, _REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)
