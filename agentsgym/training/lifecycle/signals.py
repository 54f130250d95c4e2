"""Note SIGTERM, SIGHUP and Ctrl-C without ending anything, on all ranks wherever one of them got the signal."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Generator
from functools import partial
from typing import Any, Final, NamedTuple

import torch.distributed as dist

REPEAT_S: Final = 0.5  # a second signal within it counts as the first: launchers send copies
_POLL_S: Final = 0.5  # how often a rank looks whether another one got a signal
_HANGUP: Final[dict[int, Any]] = {signal.SIGHUP: signal.SIG_DFL} if hasattr(signal, "SIGHUP") else {}  # not on Windows
DEFAULTS: Final[dict[int, Any]] = {  # the most urgent first
    signal.SIGTERM: signal.SIG_DFL,
    **_HANGUP,
    signal.SIGINT: signal.default_int_handler,
}
_num_watches = itertools.count()  # equal on all ranks, since they train equally often


class Notice(NamedTuple):
    """A signal that came, and when on the monotonic clock."""

    signum: int
    at: float


class SignalWatch:
    """Keeps the first signal until it is read; a second one has its usual effect.

    Attributes:
        notice: The first signal of any rank while :meth:`watching`; None without.
        has_repeated: Whether a second one came to this rank.
    """

    def __init__(self) -> None:
        self.notice: Notice | None = None
        self.has_repeated = False
        self._handled_at: float | None = None
        self._own: int | None = None
        self._pid = os.getpid()
        self._taken: list[int] = []

    def note(self, signum: int) -> None:
        """Keep a signal if it is the first."""
        if self.notice is None:
            self.notice = Notice(signum, time.monotonic())

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Note signals inside; handlers of the user's own stay, and outside of the main thread all handlers stay.

        On several ranks a thread shares signals, also those that come while the main thread waits for another rank.
        """
        self.notice, self.has_repeated, self._handled_at, self._own = None, False, None, None
        self._pid = os.getpid()
        number, is_main = next(_num_watches), threading.current_thread() is threading.main_thread()
        if is_main:
            self._taken = [signum for signum, usual in DEFAULTS.items() if signal.getsignal(signum) == usual]
            for signum in self._taken:
                signal.signal(signum, self._handle)
        try:
            store = _own_store()
            sharing = contextlib.nullcontext()
            if store is not None:
                sharing = _sharing(self, store, f"agentsgym/preemption/{number}", has_handlers=is_main)
            with sharing:
                yield
        finally:
            self._give_back()
            self.notice = None

    def repeat_own(self) -> None:
        """Give a signal of this rank that nobody has read its usual effect."""
        if self._own is not None:
            signal.raise_signal(self._own)

    def is_watched(self, signum: int) -> bool:
        """Whether a signal is noted now."""
        return signum in self._taken

    def _give_back(self) -> None:
        for signum in self._taken:
            signal.signal(signum, DEFAULTS[signum])
        self._taken = []

    def _handle(self, signum: int, _: Any) -> None:
        """Note the first signal. It runs between any two instructions, so that it must do no more than this."""
        now = time.monotonic()
        is_copy = os.getpid() != self._pid  # a process that was forked from this one
        if is_copy or (self._handled_at is not None and now - self._handled_at >= REPEAT_S):
            self.has_repeated = True
            self._give_back()
            signal.raise_signal(signum)
        elif self._handled_at is None:
            self._handled_at, self._own = now, signum
            self.note(signum)
            _leave_lost_terminal()


@contextlib.contextmanager
def _sharing(watch: SignalWatch, store: Any, key: str, *, has_handlers: bool) -> Generator[None]:
    """Share signals with the other ranks inside, under a key of a store."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listener = _Listener(watch, store, key, reading)
    _keep_wakeups_from_children()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False) if has_handlers else -1
    listener.start()
    try:
        yield
    finally:
        if has_handlers:
            signal.set_wakeup_fd(before)
        listener.end(writing)
        if not listener.is_alive():
            os.close(reading)
            os.close(writing)


class _Listener(threading.Thread):
    """Writes this rank's signal to the store, and notes another rank's from there."""

    def __init__(self, watch: SignalWatch, store: Any, key: str, reading: int) -> None:
        super().__init__(name="agentsgym-signals", daemon=True)
        self._watch, self._store, self._key, self._reading = watch, store, key, reading
        self._ending = False
        self._is_shared = False
        self._first_at: float | None = None

    def end(self, writing: int) -> None:
        """End the thread, at once unless the store does not answer."""
        self._ending = True
        os.write(writing, b"\0")
        self.join(timeout=5.0)

    def run(self) -> None:
        """Exchange signals until the end, or until the store is gone with its rank."""
        with contextlib.suppress(RuntimeError):  # what stores raise
            while not self._ending:
                if select.select([self._reading], [], [], _POLL_S)[0]:
                    for signum in os.read(self._reading, 64):
                        self._receive(signum)
                notice = self._watch.notice
                if notice is not None and not self._is_shared:
                    self._store.set(self._key, str(int(notice.signum)))
                    self._is_shared = True
                elif notice is None and self._store.check([self._key]):
                    self._watch.note(int(self._store.get(self._key)))
                    self._is_shared = True

    def _receive(self, signum: int) -> None:
        """Note a signal at once, although the main thread may be inside a long call, and end the process on a second.

        The main thread receives the second one too; if it does not react, the process is ended here.
        """
        if not self._watch.is_watched(signum):
            return
        now = time.monotonic()
        self._watch.note(signum)
        if self._first_at is None:
            self._first_at = now
        elif now - self._first_at >= REPEAT_S:
            time.sleep(REPEAT_S)
            if not self._watch.has_repeated:
                os._exit(128 + signum)


def _leave_lost_terminal() -> None:
    """Discard what is printed from here on where the terminal is gone, since each write would raise ``OSError``."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):  # noqa: PTH123  # in a signal handler
                os.dup2(nowhere.fileno(), stream)


def _own_store() -> Any:
    """Connect this thread to the store of the process group; None if that is impossible.

    Without it ranks learn of each other's signals when they exchange something else.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world: Any = dist.group.WORLD
    try:
        return world.get_group_store().clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # an older torch, or a store that cannot
        return None


@functools.cache
def _keep_wakeups_from_children() -> None:
    """Keep forked processes from writing their signals to this process's pipe."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
