"""One worker process as the pool sees it: start it, send to it, kill it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agentsgym.rollouts.interfaces import GRACE_S
from agentsgym.rollouts.wire import KILL_SIGNAL, NO_TRIAL, READY, SHUTDOWN, WorkItem
from agentsgym.rollouts.worker_main import serve

# Imported once, in the process that all workers are forked from, if this process has a use for them: a worker that
# takes another's place then begins in a tenth of a second.
_PRELOADED = ("agentsgym.envs.base", "transformers.tokenization_utils_tokenizers")


def _context() -> Any:
    """How processes are started: never forked from this one, whose threads and accelerators would break."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["__main__", serve.__module__, *(name for name in _PRELOADED if name in sys.modules)]
    )
    return context


class WorkerHandle:
    """One process as the pool sees it.

    Attributes:
        on_message: Called, on another thread, with each message; None is the end of the process.
        is_ready: Whether it has begun to listen.
        is_busy: Whether it has a batch that it has not answered completely: it gets the next one only then, so that
            neither side ever waits for the other to read.
        is_dead: Whether it is gone.
        is_killed: Whether it was ended on purpose.
        known_envs: The names of the environments that it has.
        droppable_envs: Those of them that it may drop.
        outbox: What it is to do next.
        trial_indices: The trials that live in it.
    """

    def __init__(self, on_message: Callable[[WorkerHandle, bytes | None], None]) -> None:
        context = _context()
        self._connection, theirs = context.Pipe()
        self._progress = context.RawArray("d", [NO_TRIAL, 0.0])
        self.on_message: Callable[[WorkerHandle, bytes | None], None] | None = on_message
        self.is_ready = self.is_busy = self.is_dead = self.is_killed = False
        self.known_envs: set[str] = set()
        self.droppable_envs: set[str] = set()
        self.outbox: list[WorkItem] = []
        self.trial_indices: set[int] = set()
        self._killer: threading.Timer | None = None
        self.process: Any = context.Process(
            target=serve, args=(theirs, self._progress), name="agentsgym-environments", daemon=True
        )
        self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="agentsgym-process-reader", daemon=True)
        self._reader.start()

    @property
    def running(self) -> tuple[int, float] | None:
        """The trial that it advances at this moment, and since when."""
        index, since = self._progress
        return None if index == NO_TRIAL or self.is_killed else (int(index), since)

    def send(self, message: bytes) -> None:
        """Send a message; if the process is gone, its reader reports that."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def kill(self) -> None:
        """End it, after it has closed its episodes where there are signals for that, for which it has ``GRACE_S``.

        A step that runs is interrupted; one that no signal interrupts, as in a library that computes, is not waited for
        longer than that.
        """
        self.is_killed = True
        if KILL_SIGNAL is None or not self.process.is_alive():
            self.process.kill()
            return
        os.kill(self.process.pid, KILL_SIGNAL)
        self._killer = threading.Timer(GRACE_S, self.process.kill)
        self._killer.daemon = True
        self._killer.start()

    def request_shutdown(self) -> None:
        """Ask it to end; kill it if it is busy."""
        if self.is_busy:
            self.kill()
        else:
            self.send(SHUTDOWN)

    def end(self) -> None:
        """Wait for its end."""
        self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if self._killer is not None:
            self._killer.cancel()
        self._reader.join(GRACE_S)  # a process that the environment forked off may keep the connection open
        self._connection.close()

    def _read(self) -> None:
        """Hand on what it sends, on a thread that does nothing else, so that it never has to wait to be read."""
        try:
            while True:
                self._deliver(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.is_dead = True
            self._deliver(None)

    def _deliver(self, message: bytes | None) -> None:
        on_message = self.on_message
        if message == READY:
            self.is_ready = True
        elif on_message is not None:
            on_message(self, message)

    @property
    def killed_by_signal(self) -> bool:
        """Whether a signal ended it, not something that it ran into."""
        return self.is_killed or (self.process.exitcode or 0) < 0

    def how_it_ended(self) -> str:
        """The signal or the exit code, in words."""
        code: int | None = self.process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"
