"""Run third-party code in a separate Python process that serves requests, one JSON object per line.

The process is started with ``python -m``, so the caller's script needs no ``if __name__ == "__main__":`` guard.
``ChildProcess`` is used by the parent, ``serve`` by the child.
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
from agentsgym.processes import ProcessGroup

_CHUNK_BYTES = 1 << 16  # the capacity of a pipe


class ChildExitedError(Exception):
    """The process exited without responding.

    Attributes:
        timed_out: Whether it was killed for exceeding its time limit.
        returncode: The return code, as in :class:`subprocess.Popen`.
        how: A verb phrase that describes how it ended, for error messages.
    """

    def __init__(self, returncode: int | None, *, timed_out: bool) -> None:
        self.returncode = returncode
        self.timed_out = timed_out
        self.how = f"exited with code {returncode}"
        if returncode is not None and returncode < 0:
            with suppress(ValueError):
                self.how = f"was killed by {signal.Signals(-returncode).name}"
        super().__init__(f"the process {self.how}")


class ChildProcess:
    """A process that serves one request at a time; the caller must serialize access from several threads."""

    def __init__(self, module: str, name: str) -> None:
        """Start the process, without waiting for its imports.

        Args:
            module: The module to run with ``python -m``; it must call :func:`serve`.
            name: The name of the process in error messages.
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._group = ProcessGroup([sys.executable, "-m", module])
        try:
            self._process: subprocess.Popen[bytes] = self._group.start(
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,  # a buffer has a lock, which a fork while a thread holds it would leave locked forever
                env=environment,
            )
        except OSError as error:
            raise EnvError(f"{name} cannot be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """The id of the process; None if it has ended."""
        return self._group.pid

    def call(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and wait for the response.

        If the wait is interrupted, for example by Ctrl-C, the process is killed, so that the next request cannot read
        this request's response.

        Args:
            request: The request, a JSON object.
            limit_s: The time in seconds after which the process is killed.
        """
        process, timed_out = self._process, threading.Event()
        request_line = json.dumps(request).encode() + b"\n"

        def kill() -> None:
            timed_out.set()
            self._group.end()

        timer = threading.Timer(limit_s, kill)
        timer.daemon = True
        timer.start()
        try:
            response_line = self._exchange(request_line)
        except (OSError, ValueError):  # the pipe is broken, or was closed by another thread that ended the process
            response_line = b""
        except BaseException:
            self.end()
            raise
        finally:
            timer.cancel()
        if not response_line.endswith(b"\n"):
            self.end(wait_s=1.0)  # leaves time to get the return code if the process exited on its own
            raise ChildExitedError(process.returncode, timed_out=timed_out.is_set())
        return json.loads(response_line)

    def end(self, wait_s: float = 0.0) -> None:
        """Close the pipes after waiting up to ``wait_s`` seconds for the process to exit, then killing its group."""
        if wait_s:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        self._group.end()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _exchange(self, request: bytes) -> bytes:
        """Send a line and read one, which lacks its newline if the process exited."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise AssertionError("the child process must be started with stdin and stdout pipes")
        remaining = memoryview(request)
        while remaining:
            remaining = remaining[stdin.write(remaining) :]
        chunks: list[bytes] = []
        while not chunks or not chunks[-1].endswith(b"\n"):
            chunk = stdout.read(_CHUNK_BYTES)
            if not chunk:
                break
            chunks.append(chunk)
        return b"".join(chunks)


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Serve requests until the input ends, which happens when the parent process exits.

    Anything that libraries print, from Python or native code, is discarded, so it cannot be mistaken for a response.

    Args:
        handle: The function that computes the response to a request; both are JSON objects.
    """
    with Path(os.devnull).open("w") as null_output:
        responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(null_output.fileno(), 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    with Path(os.devnull).open() as null_input:
        os.dup2(null_input.fileno(), 0)  # libraries must not read requests either
    for line in requests:
        responses.write(json.dumps(handle(json.loads(line))) + "\n")
        responses.flush()
