"""The pool's handle to one worker process: start it, send to it, measure it, kill it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from agentsgym.processes import kill_group
from agentsgym.rollouts.scheduler import GRACE_S
from agentsgym.rollouts.workers.main import LOST_CONNECTION, serve
from agentsgym.rollouts.workers.wire import (
    CLOSE,
    CLOSED,
    INTERRUPTED,
    IS_WAITING,
    KILL_SIGNAL,
    LOADED,
    NO_TRIAL,
    READY,
    SHUTDOWN,
    BrokenChannelError,
    Channel,
    WorkItem,
    make_pipe,
)

MEGABYTE = 1_000_000


def resident_mb(pid: int) -> float | None:
    """The resident set of a process in megabytes (10^6 bytes), including shared pages; None if the process ended."""
    try:
        return psutil.Process(pid).memory_info().rss / MEGABYTE
    except psutil.Error:
        return None


# The fork server imports these once if this process has imported them, so that a replacement worker starts in a tenth
# of a second.
_PRELOADED = ("agentsgym.envs.base", "transformers.tokenization_utils_tokenizers")
# The system, a job scheduler or a terminal may send these to any process, so they are weak evidence against a trial.
_EXTERNAL_SIGNALS = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_UNKNOWN = 255  # the exit code reported by multiprocessing if the fork server is gone
_SILENCE_S = 1  # seconds between checks that a silent process is alive
_MAX_ATTEMPTS = 10
_BETWEEN_ATTEMPTS_S = 0.1
_SENDING_S = 30  # how long a process may leave a message unread
_PROCESSES = threading.Lock()  # multiprocessing may read an exit code twice if two threads request it concurrently


def _context() -> Any:
    """The context for starting processes. They are not forked from this one, since its threads and GPUs would break."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "agentsgym.rollouts.workers.fork_server",
            "__main__",
            serve.__module__,
            *(name for name in _PRELOADED if name in sys.modules),
        ]
    )
    return context


class WorkerHandle:
    """The pool's handle to one worker process.

    Attributes:
        on_message: Called on another thread with each message, and with None at the end of the process.
        is_ready: Whether the process is ready for messages.
        is_busy: Whether it is still answering a batch; the next batch is sent only afterwards, so that neither side
            ever waits for the other to read.
        is_loading: Whether it is still unpickling the environments that it was sent, which may import many modules.
        is_closing: Whether it is busy closing the trials of an aborted run.
        is_dead: Whether the process has ended.
        is_killed: Whether it was killed by the pool.
        is_draining: Whether it receives no more trials, and is replaced when its trials are over.
        why_killed: Why it was killed, if that is more informative than the signal; otherwise empty.
        known_envs: The names of the environments that were sent to it.
        droppable_envs: The names of environments that it may drop.
        outbox: Work to send next.
        residents: The indices of the trials in the process.
        hosted: The first two trials that were ever in the process, in this run and earlier ones: if there is only one,
            no other trial can have broken the process.
        num_ended: Number of trials that ended in the process.
        fresh_mb: Memory in megabytes before the first trial; None if that cannot be measured.
    """

    def __init__(self, on_message: Callable[[WorkerHandle, bytes | None], None]) -> None:
        context = _context()
        ours, theirs, key = make_pipe()
        self._channel = Channel(ours, key)
        self._channel.limit_waits(_SILENCE_S, _SENDING_S)
        self._progress = context.RawArray("d", [NO_TRIAL, 0.0])
        self.on_message: Callable[[WorkerHandle, bytes | None], None] | None = on_message
        self.is_ready = self.is_busy = self.is_dead = self.is_killed = self.is_draining = False
        self.is_closing = self.is_loading = False
        self.why_killed = ""
        self.known_envs: set[str] = set()
        self.droppable_envs: set[str] = set()
        self.outbox: list[WorkItem] = []
        self.residents: set[int] = set()
        self.hosted: set[object] = set()
        self.num_ended = 0
        self.fresh_mb: float | None = None
        self._sent_at = time.monotonic()
        self._stepped: int | None = None
        self._killer: threading.Timer | None = None
        self._closing: threading.Timer | None = None
        self.process: Any = context.Process(
            target=serve, args=(theirs, key, self._progress, os.getpid()), name="agentsgym-environments", daemon=True
        )
        self._start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="agentsgym-process-reader", daemon=True)
        self._reader.start()

    def _start(self) -> None:
        """Start the process; retry if the fork server ended at that moment, since a new one is started."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                with _PROCESSES:
                    self.process.start()
            except (ConnectionError, EOFError):
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
                time.sleep(_BETWEEN_ATTEMPTS_S)
            else:
                return

    def host(self, session_id: object) -> None:
        """Record a trial that starts in the process; only two are kept, to bound memory."""
        if len(self.hosted) < 2:
            self.hosted.add(session_id)

    @property
    def running(self) -> tuple[int, float] | None:
        """The trial that is being advanced, and since when."""
        index, since = self._progress
        return None if index < 0 or self.is_killed else (int(index), since)

    @property
    def stepped(self) -> int | None:
        """The trial that was being advanced when the process was killed or died."""
        running = self.running
        return self._stepped if running is None else running[0]

    def send(self, message: bytes) -> None:
        """Send a message; if the process is gone, the reader thread reports that."""
        self._sent_at = time.monotonic()
        try:
            self._channel.send(message)
        except BlockingIOError:
            self.kill(f"it left a message unread for {_SENDING_S} s")
        except OSError:
            pass

    def kill(self, why: str = "", *, immediately: bool = False) -> None:
        """Kill the process; on systems with signals, it first gets ``GRACE_S`` to close its episodes.

        A running step is interrupted; one that signals cannot interrupt, such as a long call of a C library, is killed
        after that time.
        """
        if self.is_killed:
            return
        running = self.running
        self._stepped = None if running is None else running[0]
        self.why_killed, self.is_killed = why, True
        if immediately or KILL_SIGNAL is None or not self._is_alive():
            self.process.kill()
            return
        self._kill_later()  # first, so that the reader finds the timer when the process ends
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, KILL_SIGNAL)

    def close_trials(self) -> None:
        """Make the process close its trials within ``GRACE_S``, because the run was aborted."""
        self.is_busy = self.is_closing = True
        self._closing = threading.Timer(GRACE_S, self._give_up_closing)
        self._closing.daemon = True
        self._closing.start()
        self.send(CLOSE)

    def _give_up_closing(self) -> None:
        if self.is_closing:
            self.kill(f"closing the episodes of an aborted rollout took longer than {GRACE_S:.0f} s", immediately=True)

    def request_shutdown(self) -> None:
        """Request the shutdown of the process; kill it if it is busy or does not end in time."""
        if self.is_dead:
            return
        if self.is_busy and not self.is_closing:
            self.kill()
        else:
            self._kill_later()  # first, so that the reader finds the timer when the process ends
            self.send(SHUTDOWN)

    def end(self) -> None:
        """Wait for the end of the process."""
        self._reader.join(GRACE_S + _SILENCE_S)
        if self._reader.is_alive():
            self.process.kill()
            self._reader.join()
        for timer in (self._killer, self._closing):
            if timer is not None:
                timer.join()

    def _kill_later(self) -> None:
        if self._killer is None:
            self._killer = threading.Timer(GRACE_S, self.process.kill)
            self._killer.daemon = True
            self._killer.start()

    def _is_alive(self) -> bool:
        """Whether the process is alive; does not wait."""
        with _PROCESSES:
            return self.process.is_alive()

    def _read(self) -> None:
        """Deliver the messages of the process until it ends, on a dedicated thread, so that they are always read."""
        with suppress(EOFError, OSError):
            try:
                while True:
                    self._deliver(self._channel.receive(self._check_silence))
            except BrokenChannelError as error:
                self.kill(str(error))
        if not multiprocessing.connection.wait([self.process.sentinel], timeout=GRACE_S):
            self.process.kill()  # the process is alive, but lost its connection
            multiprocessing.connection.wait([self.process.sentinel])
        kill_group(self.process.pid)  # what user code has left behind
        with _PROCESSES:
            self.process.join()
        self.is_dead = True
        self._channel.close()
        for timer in (self._killer, self._closing):
            if timer is not None:
                timer.cancel()
        self._deliver(None)

    def _check_silence(self) -> None:
        """Check that a silent process is alive and does not wait for a lost message."""
        if not self._is_alive():  # a child process of the environment may keep the connection open
            raise EOFError
        what, since = self._progress
        overdue = time.monotonic() - max(self._sent_at, since) > GRACE_S
        if self.is_busy and what == IS_WAITING and overdue and not self._channel.num_unread():
            raise BrokenChannelError("another reader consumed a message that was sent to it")

    def _deliver(self, message: bytes | None) -> None:
        if message == READY:
            self.fresh_mb = resident_mb(self.process.pid)
            self.is_ready = True
            return
        if message == LOADED:
            self.is_loading = False
        if message == CLOSED:
            if self._closing is not None:
                self._closing.cancel()
            self.is_busy = self.is_closing = False
        on_message = self.on_message  # read after the flags are set, so a run that begins now sees them or is notified
        if on_message is not None:
            on_message(self, message)

    @property
    def killed_by_signal(self) -> bool:
        """Whether a signal or an unknown cause ended the process, rather than its own code."""
        code: int = self.process.exitcode or 0
        return self.is_killed or code < 0 or code in {_UNKNOWN, INTERRUPTED}

    @property
    def may_have_external_cause(self) -> bool:
        """Whether it ended in a way that may have an external cause, which is weak evidence against a trial."""
        code: int = self.process.exitcode or 0
        signals = {-int(getattr(signal, name)) for name in _EXTERNAL_SIGNALS if hasattr(signal, name)}
        return not self.is_killed and code in {*signals, _UNKNOWN, INTERRUPTED}

    def how_it_ended(self) -> str:
        """Describe how the process ended, by signal or exit code."""
        code: int | None = self.process.exitcode
        if self.why_killed:
            return self.why_killed
        if code == LOST_CONNECTION:
            return "user code closed its connection, wrote to it or read from it"
        if code == _UNKNOWN:
            return "exit code 255, or unknown because the process that it was forked from ended as well"
        if code == INTERRUPTED and KILL_SIGNAL is not None:
            return f"signal {KILL_SIGNAL.name}"
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"
