"""Run a check within a time limit, and find the line that is running when it is exceeded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from agentsgym.errors import ConfigError
from agentsgym.fields import is_positive_number, require
from agentsgym.interruptions import Interruption

_REPEAT_S = 1.0  # for a hook that catches whatever is raised


class OutOfTimeError(Interruption):
    """The time limit is exceeded: an interruption, so that no episode records it as its failure.

    Attributes:
        place: File and line that ran at that moment.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


@contextmanager
def time_limit(limit_s: float | None) -> Generator[None]:
    """Raise in the code that runs inside once a time limit is exceeded; None for no limit.

    It is raised by a signal, like Ctrl+C: sleeping, waiting and Python's own loops end, a computation in C does not.

    Raises:
        OutOfTimeError: The limit is exceeded.
        ConfigError: The limit is not valid, or timer signals are not available here.
    """
    if limit_s is None:
        yield
        return
    require("limit_s", limit_s, is_positive_number, "a positive number or None")
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise ConfigError("limit_s needs a timer signal, which is available only in the main thread of a Unix process")

    def stop(_: int, frame: FrameType | None) -> None:
        own = frame
        while own is not None and own.f_code.co_filename == threading.__file__:  # Python's own code, which waits
            own = own.f_back
        own = own or frame
        raise OutOfTimeError("" if own is None else f"{own.f_code.co_filename}:{own.f_lineno}")

    handler = signal.signal(signal.SIGALRM, stop)
    before = signal.setitimer(signal.ITIMER_REAL, limit_s, _REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)
