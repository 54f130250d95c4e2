"""A process in which episodes are advanced, as the pool sees it."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentsgym.rollouts.pools import GRACE_S
from agentsgym.rollouts.workers import GOODBYE, HELLO, NOBODY, Start, WireMove, serve

# Imported once, in the process that all workers are forked from, if this process has a use for them: a worker that
# takes another's place then begins in a tenth of a second.
_PRELOADED = ("agentsgym.envs.base", "transformers.tokenization_utils_tokenizers")


def _context() -> Any:
    """How processes are started: never forked from this one, whose threads and accelerators would not bear it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["__main__", serve.__module__, *(name for name in _PRELOADED if name in sys.modules)]
    )
    return context


class Worker:
    """One process as the pool sees it.

    Attributes:
        hears: What is called, on another thread, with each message; None is the end of the process.
        is_ready: Whether it has begun to listen.
        is_busy: Whether it has a batch that it has not answered completely: it gets the next one only then, so that
            neither side ever waits for the other to read.
        is_dead: Whether it is gone.
        is_killed: Whether it was ended on purpose.
        known: The names of the environments that it has.
        forgotten: Those of them that it may drop.
        outbox: What it is to do next.
        indices: The sessions that live in it.
    """

    def __init__(self, hears: Callable[[Worker, bytes | None], None]) -> None:
        context = _context()
        self._connection, theirs = context.Pipe()
        self._progress = context.RawArray("d", [NOBODY, 0.0])
        self.hears: Callable[[Worker, bytes | None], None] | None = hears
        self.is_ready = self.is_busy = self.is_dead = self.is_killed = False
        self.known: set[str] = set()
        self.forgotten: set[str] = set()
        self.outbox: list[Start | tuple[int, WireMove]] = []
        self.indices: set[int] = set()
        self.process: Any = context.Process(
            target=serve, args=(theirs, self._progress), name="agentsgym-environments", daemon=True
        )
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="agentsgym-process-reader", daemon=True)
        self._reader.start()

    @property
    def running(self) -> tuple[int, float] | None:
        """The episode that it advances at this moment, and since when."""
        index, since = self._progress
        return None if index == NOBODY or self.is_killed else (int(index), since)

    def send(self, message: bytes) -> None:
        """Send a message; if the process is gone, its reader says so."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def kill(self) -> None:
        """End it at once."""
        self.is_killed = True
        self.process.kill()

    def say_goodbye(self) -> None:
        """Ask it to end, or make it end if it is doing something."""
        if self.is_busy:
            self.kill()
        else:
            self.send(GOODBYE)

    def end(self) -> None:
        """Wait for its end."""
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._reader.join(GRACE_S)  # a process that the environment forked off may keep the line open
        self._connection.close()

    def _read(self) -> None:
        """Post what it sends, on a thread that does nothing else, so that it never has to wait to be read."""
        try:
            while True:
                self._post(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.is_dead = True
            self._post(None)

    def _post(self, message: bytes | None) -> None:
        hears = self.hears
        if message == HELLO:
            self.is_ready = True
        elif hears is not None:
            hears(self, message)

    @property
    def was_shot(self) -> bool:
        """Whether a signal ended it, not something that it ran into."""
        return (self.process.exitcode or 0) < 0

    def how_it_ended(self) -> str:
        """In words."""
        code: int | None = self.process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"
