"""Record SIGTERM, SIGHUP and Ctrl-C without acting on them, on every rank as soon as any rank receives one."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, NamedTuple

import torch.distributed as dist

REPEAT_S: Final = 0.5  # a second signal within this time is ignored, since launchers send duplicates
_POLL_S: Final = 0.5  # seconds between checks for a signal on another rank
_HANGUP: Final[dict[int, Any]] = {signal.SIGHUP: signal.SIG_DFL} if hasattr(signal, "SIGHUP") else {}  # not on Windows
DEFAULTS: Final[dict[int, Any]] = {  # the most urgent first
    signal.SIGTERM: signal.SIG_DFL,
    **_HANGUP,
    signal.SIGINT: signal.default_int_handler,
}
_num_watches = itertools.count()  # the same on all ranks, since they all call `train` the same number of times


class ReceivedSignal(NamedTuple):
    """A received signal, and its time on the monotonic clock."""

    signum: int
    at: float


class SignalWatch:
    """Records the first signal for the training loop to read; a second signal has its default effect.

    Attributes:
        notice: The first signal that any rank received inside :meth:`watching`; None if there was none.
        has_repeated: Whether this rank received a second signal.
        taken: The signals that are recorded instead of having their default effects.
    """

    def __init__(self) -> None:
        self.notice: ReceivedSignal | None = None
        self.has_repeated = False
        self._handled_at: float | None = None
        self._own: int | None = None
        self._pid = os.getpid()
        self.taken: list[int] = []

    def note(self, signum: int) -> None:
        """Record a signal if it is the first."""
        if self.notice is None:
            self.notice = ReceivedSignal(signum, time.monotonic())

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Record signals inside the block. Handlers set by the user are kept; outside the main thread, all are.

        With several ranks, a background thread shares signals, even those that arrive while the main thread waits for
        another rank.
        """
        self.notice, self.has_repeated, self._handled_at, self._own = None, False, None, None
        self._pid = os.getpid()
        number, is_main = next(_num_watches), threading.current_thread() is threading.main_thread()
        if is_main:
            self.taken = [signum for signum, usual in DEFAULTS.items() if signal.getsignal(signum) == usual]
            for signum in self.taken:
                signal.signal(signum, self._handle)
        try:
            store = _own_store()
            sharing = contextlib.nullcontext()
            if store is not None:
                sharing = _sharing(self, store, f"agentsgym/preemption/{number}", has_handlers=is_main)
            with sharing, _outliving_terminal() if is_main else contextlib.nullcontext():
                yield
        finally:
            self._restore_handlers()
            self.notice = None

    def reraise_own_signal(self) -> None:
        """Raise the signal that this rank received again, if any, so that it has its default effect."""
        if self._own is not None:
            signal.raise_signal(self._own)

    def _restore_handlers(self) -> None:
        for signum in self.taken:
            signal.signal(signum, DEFAULTS[signum])
        self.taken = []

    def _handle(self, signum: int, _: Any) -> None:
        """Record the first signal. Runs between any two bytecode instructions, so it must do as little as possible."""
        now = time.monotonic()
        is_copy = os.getpid() != self._pid  # a process that was forked from this one
        if is_copy or (self._handled_at is not None and now - self._handled_at >= REPEAT_S):
            self.has_repeated = True
            self._restore_handlers()
            signal.raise_signal(signum)
        elif self._handled_at is None:
            self._handled_at, self._own = now, signum
            self.note(signum)
            _discard_output_of_lost_terminal()


@contextlib.contextmanager
def _sharing(watch: SignalWatch, store: Any, key: str, *, has_handlers: bool) -> Generator[None]:
    """Inside the block, share signals with the other ranks, under a key of a store."""
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
    """Writes this rank's signal to the store, and records a signal that another rank wrote there."""

    def __init__(self, watch: SignalWatch, store: Any, key: str, reading: int) -> None:
        super().__init__(name="agentsgym-signals", daemon=True)
        self._watch, self._store, self._key, self._reading = watch, store, key, reading
        self._ending = False
        self._is_shared = False
        self._first_at: float | None = None

    def end(self, writing: int) -> None:
        """Stop the thread, which takes time only if the store does not respond."""
        self._ending = True
        os.write(writing, b"\0")
        self.join(timeout=5.0)

    def run(self) -> None:
        """Exchange signals until :meth:`end` is called, or the rank that hosts the store exits."""
        with contextlib.suppress(RuntimeError):  # raised by a store whose host is gone
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
        """Record a signal immediately, even if the main thread is inside a long call; end the process on a second one.

        The main thread receives the second signal too; if it does not react, this thread ends the process.
        """
        if signum not in self._watch.taken:
            return
        now = time.monotonic()
        self._watch.note(signum)
        if self._first_at is None:
            self._first_at = now
        elif now - self._first_at >= REPEAT_S:
            time.sleep(REPEAT_S)
            if not self._watch.has_repeated:
                os._exit(128 + signum)


def _discard_output_of_lost_terminal() -> None:
    """Redirect stdout and stderr to the null device if their terminal is gone: writes to it raise ``OSError``."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):  # noqa: PTH123  # in a signal handler
                os.dup2(nowhere.fileno(), stream)


class _TerminalOutput:
    """A terminal that may be gone, which a write can find out before the signal of it arrives."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._attempt(self._stream.flush)

    @staticmethod
    def _attempt(write: Callable[..., Any], *text: str) -> None:
        try:
            write(*text)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _discard_output_of_lost_terminal()


@contextlib.contextmanager
def _outliving_terminal() -> Generator[None]:
    """Inside the block, what is printed to a terminal that is gone is discarded."""
    streams: list[Any] = [
        one if one is None or not one.isatty() else _TerminalOutput(one) for one in (sys.stdout, sys.stderr)
    ]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield


def _own_store() -> Any:
    """Connect this thread to the store of the process group; None if that is impossible.

    Without a store, a rank learns of another rank's signal at their next collective operation.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world: Any = dist.group.WORLD
    try:
        return world.get_group_store().clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # an older torch, or a store that cannot be cloned
        return None


@functools.cache
def _keep_wakeups_from_children() -> None:
    """Prevent forked processes from writing their signals to this process's pipe."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
