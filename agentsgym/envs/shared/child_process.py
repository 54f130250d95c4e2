"""Run foreign code in a Python process of its own, which answers requests, a JSON object a line.

Started by a module's name, so that a script needs no ``if __name__ == "__main__":`` for it. ``ChildProcess`` is the
owner's side, ``serve`` the process's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentsgym.errors import EnvError

_CHUNK_BYTES = 1 << 16  # what a pipe holds


class ChildEndedError(Exception):
    """The process ended without an answer.

    Attributes:
        was_killed: Whether that was for time.
        returncode: As of :class:`subprocess.Popen`.
    """

    def __init__(self, returncode: int | None, *, was_killed: bool) -> None:
        super().__init__(f"the process {_how_it_ended(returncode)}")
        self.returncode = returncode
        self.was_killed = was_killed

    @property
    def how(self) -> str:
        """What ended it, for a sentence."""
        return _how_it_ended(self.returncode)


class ChildProcess:
    """A process that answers one request after the other; its owner sees to it that threads take turns."""

    def __init__(self, module: str, name: str) -> None:
        """Start it, without waiting until it has imported anything.

        Args:
            module: What it runs, as ``python -m`` does: a module that calls :func:`serve`.
            name: What it is called in errors.

        Raises:
            EnvError: It cannot be started.
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,  # a buffer's lock, held by a thread of the owner, would never be free in a fork
                env=environment,
            )
        except OSError as error:
            raise EnvError(f"{name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Args:
            request: JSON values.
            limit_s: Seconds after which the process is killed.

        Raises:
            ChildEndedError: It ended, by itself or for time; so it does, whatever else breaks the wait off, since the
                next request must not read this one's answer.
        """
        process, killed = self._process, threading.Event()
        line = json.dumps(request).encode() + b"\n"

        def kill() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.daemon = True
        timer.start()
        try:
            line = self._exchange(line)
        except (OSError, ValueError):  # a broken pipe, or one that another thread closed when it ended the process
            line = b""
        except BaseException:
            self.end()
            raise
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self.end(wait_s=1.0)  # where it ended by itself, this tells how
            raise ChildEndedError(process.returncode, was_killed=killed.is_set())
        return json.loads(line)

    def end(self, wait_s: float = 0.0) -> None:
        """Kill the process, if it is not over within so many seconds, and close what leads to it."""
        process = self._process
        if wait_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
        process.kill()
        process.wait()
        self._close_pipes()

    def forget(self) -> None:
        """Leave the process to the process that started it, of which this one is a fork."""
        self._process.returncode = 0  # else it is waited for, and is no child of this process
        self._close_pipes()

    def _exchange(self, request: bytes) -> bytes:
        """Send a line and read one, which has no end where the process ended."""
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None:
            raise AssertionError(self._process)
        left = memoryview(request)
        while left:
            left = left[sent.write(left) :]
        chunks: list[bytes] = []
        while not chunks or not chunks[-1].endswith(b"\n"):
            chunk = received.read(_CHUNK_BYTES)
            if not chunk:
                break
            chunks.append(chunk)
        return b"".join(chunks)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _how_it_ended(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with code {returncode}"


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input ends, which it does with the owner.

    What libraries print, in Python or below it, goes nowhere: no line of theirs is an answer.

    Args:
        answer: Given a request, JSON values; gives the answer, JSON values.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's
    with Path(os.devnull).open("w") as nowhere:
        replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(nowhere.fileno(), 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # nor does a library read requests
    for line in requests:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
