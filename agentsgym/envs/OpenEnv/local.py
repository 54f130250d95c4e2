"""Start an OpenEnv server on this machine, wait until it responds, and stop it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
import weakref
from typing import IO

from agentsgym.envs.OpenEnv.http import get_json
from agentsgym.envs.OpenEnv.server import OpenEnvServer
from agentsgym.errors import EnvError
from agentsgym.processes import ProcessGroup
from agentsgym.texts import sentence_of, visible

_STOPPING_S = 5.0  # between terminating a server and killing it
_POLL_S = 0.05
_TAIL_BYTES = 2000  # of the server's output, included in the error if it does not start

_Process = subprocess.Popen[bytes]


class LocalServer:
    """A server started on this machine; ``stop()`` terminates it, and kills it if it does not exit."""

    def __init__(self, server: OpenEnvServer, port: int | None = None) -> None:
        """Start the command of a server on a port, None for any free one, and wait until it responds.

        Raises:
            ConfigError: See :meth:`OpenEnvServer.request_headers`.
            EnvError: The program cannot be started, exits, or does not respond in time.
        """
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = int(free.getsockname()[1])
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._server = server
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the server is stopped
        group = ProcessGroup([part.replace("{port}", str(port)) for part in server.command or ()], grace_s=_STOPPING_S)
        try:
            self._process: _Process = group.start(
                env={**os.environ, "PORT": str(port), **server.env},
                cwd=server.cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._output.close()
            raise EnvError(f"{server.label} cannot be started: {sentence_of(error)}") from error
        self.stop = weakref.finalize(self, _stop, os.getpid(), group, self._process, self._output)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def is_running(self) -> bool:
        """Whether the server is still running."""
        return self._process.poll() is None

    def _wait(self) -> None:
        deadline = time.monotonic() + self._server.start_timeout_s
        while self.is_running() and time.monotonic() <= deadline:
            with contextlib.suppress(EnvError):
                get_json(self._server, self.url, "health", limit_s=1.0)
                return
            time.sleep(_POLL_S)
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _TAIL_BYTES))
        text = visible(self._output.read().decode(errors="replace")).strip()
        printed = f"; it printed:\n{text}" if text else "; it printed nothing"
        if not self.is_running():
            raise EnvError(f"{self._server.label} exited with code {self._process.returncode}{printed}")
        raise EnvError(
            f"{self._server.label} did not respond at {self.url}/health within {self._server.start_timeout_s:g} s: "
            f"does it listen on the port given by {{port}} in the command, or by the variable PORT?{printed}"
        )


def _stop(owner: int, group: ProcessGroup, process: _Process, output: IO[bytes]) -> None:
    """End the server and wait for that; do nothing in a forked process."""
    if os.getpid() == owner:
        group.end()
        process.wait()
        output.close()
