"""Run foreign code in a separate Python process that serves requests, one JSON object per line.

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

_CHUNK_BYTES = 1 << 16  # the capacity of a pipe


class ChildEndedError(Exception):
    """The process ended without a response.

    Attributes:
        was_killed: Whether it was killed for exceeding its time limit.
        returncode: The return code, as for :class:`subprocess.Popen`.
        how: How it ended, for an error message.
    """

    def __init__(self, returncode: int | None, *, was_killed: bool) -> None:
        self.returncode = returncode
        self.was_killed = was_killed
        self.how = f"ended with code {returncode}"
        if returncode is not None and returncode < 0:
            with suppress(ValueError):
                self.how = f"was killed by {signal.Signals(-returncode).name}"
        super().__init__(f"the process {self.how}")


class ChildProcess:
    """A process that serves one request after the other; its owner must serialize access by threads."""

    def __init__(self, module: str, name: str) -> None:
        """Start it, without waiting for its imports.

        Args:
            module: The module to run, as with ``python -m``; it must call :func:`serve`.
            name: The name of the process in errors.

        Raises:
            EnvError: The process cannot be started.
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
        """Send a request and wait for the response.

        Args:
            request: The request, JSON values.
            limit_s: Seconds after which the process is killed.

        Raises:
            ChildEndedError: The process ended, by itself or at the time limit. Any other interruption of the wait also
                ends it, since the next request must not read this one's response.
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
        except (OSError, ValueError):  # a broken pipe, or one closed by another thread that ended the process
            line = b""
        except BaseException:
            self.end()
            raise
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self.end(wait_s=1.0)  # gets the return code if it ended by itself
            raise ChildEndedError(process.returncode, was_killed=killed.is_set())
        return json.loads(line)

    def end(self, wait_s: float = 0.0) -> None:
        """Kill the process, unless it ends within ``wait_s`` seconds, and close its pipes."""
        process = self._process
        if wait_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
        process.kill()
        process.wait()
        self._close_pipes()

    def forget(self) -> None:
        """Drop the process without ending it, after a fork: it belongs to the parent."""
        self._process.returncode = 0  # otherwise it is waited for, although not a child of this process
        self._close_pipes()

    def _exchange(self, request: bytes) -> bytes:
        """Send a line and read one, which is unterminated if the process ended."""
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


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve requests until the input ends, which happens when the owner ends.

    Output that libraries print, in Python or below it, is discarded: it must not be taken for a response.

    Args:
        answer: The function from a request to its response, both JSON values.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner
    with Path(os.devnull).open("w") as nowhere:
        replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(nowhere.fileno(), 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # libraries must not read requests either
    for line in requests:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
