"""Manage an environment's resources in one process: a server that it started, and open connections."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import IO, Any

from agentsgym.envs.OpenEnv.server import OpenEnvServer
from agentsgym.envs.OpenEnv.wire import Connection, FullServerError, get_json
from agentsgym.errors import ConfigError, EnvError
from agentsgym.processes import ProcessGroup
from agentsgym.texts import sentence_of, shown, visible

logger = logging.getLogger(__name__)

_FULL_GRACE_S = 1.0  # a server may still be closing an environment
_RETRY_S = 0.05
_MAX_OPENERS = 16  # connections opened concurrently
_SEED = 20_251_021  # arbitrary
_STOPPING_S = 5.0  # between terminating a server and killing it
_POLL_S = 0.05
_TAIL_BYTES = 2000  # of the server's output, included in the error if it does not start
_checked: list[tuple[OpenEnvServer, str]] = []  # a list, since servers cannot be hashed
_checked_lock = threading.Lock()


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
        filled = [part.replace("{port}", str(port)) for part in server.command or ()]
        self._group = ProcessGroup(filled, grace_s=_STOPPING_S)
        try:
            self._process: subprocess.Popen[bytes] = self._group.start(
                env={**os.environ, "PORT": str(port), **server.env},
                cwd=server.cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._output.close()
            raise EnvError(f"{server.label} cannot be started: {sentence_of(error)}") from error
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and all that it has started, and wait for that."""
        self._group.end()
        self._process.wait()
        self._output.close()

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


class ServerConnections:
    """The connections of one process, created at first use."""

    def __init__(self, server: OpenEnvServer, url: str | None = None) -> None:
        """Store the server, and the URL of a program that another process started, if any."""
        self.pid = os.getpid()
        self._server = server
        self._url = server.url or url
        self._local: LocalServer | None = None
        self._lock = threading.Lock()
        self._sessions: dict[str, Connection] = {}
        self._num_proven = 0

    @property
    def known_url(self) -> str | None:
        """The URL of the server; None for a program that is not running yet."""
        return self._url or (None if self._local is None else self._local.url)

    def url(self) -> str:
        """Return the URL of the server; a program is started at first use, and restarted after it has exited.

        Raises:
            ConfigError: An environment variable in the server's headers is not set.
            EnvError: The program cannot be started.
        """
        if self._url is not None:
            return self._url
        with self._lock:
            if self._local is None:
                self._local = LocalServer(self._server)
            elif not self._local.is_running():
                self._local.stop()
                self._local = LocalServer(self._server, self._local.port)
            return self._local.url

    def connect(self) -> Connection:
        """Open a new connection.

        Raises:
            EnvError: The server cannot be reached, is full, or cannot create an environment.
        """
        url, deadline = self.url(), time.monotonic() + _FULL_GRACE_S
        while True:
            try:
                return Connection(self._server, url)
            except FullServerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    def begin(self, session_id: str) -> Connection:
        """Open a session's connection, and close the previous one."""
        self.end(session_id)
        connection = self._sessions[session_id] = self.connect()
        return connection

    def connection(self, session_id: str) -> Connection:
        """Return a session's connection."""
        if session_id not in self._sessions:
            raise EnvError(f"{self._server.label} has no episode for this session: call _initialize_episode first")
        return self._sessions[session_id]

    def end(self, session_id: str) -> None:
        """Close a session's connection, if it has one."""
        connection = self._sessions.pop(session_id, None)
        if connection is not None:
            connection.close()

    def check_capacity(self, num_live: int) -> None:
        """Check that the server supports a number of connections by opening them, since it does not report its limit.

        Raises:
            ConfigError: The server supports fewer connections.
            EnvError: The server cannot be reached, or cannot create an environment.
        """
        if num_live <= self._num_proven:
            return
        opened = [self.connect()]
        try:
            with ThreadPoolExecutor(min(_MAX_OPENERS, num_live)) as openers:
                futures = [openers.submit(self.connect) for _ in range(num_live - 1)]
                done, left = wait(futures, return_when=FIRST_EXCEPTION)
                for future in left:
                    future.cancel()
            opened += [one.result() for one in futures if not one.cancelled() and one.exception() is None]
            errors = [error for one in done if (error := one.exception()) is not None]
        finally:
            with ThreadPoolExecutor(_MAX_OPENERS) as closers:
                list(closers.map(Connection.close, opened))
        for error in errors[:1]:
            if not isinstance(error, FullServerError):
                raise error
            most = "" if error.max_sessions is None else f" (its total limit is {error.max_sessions})"
            raise ConfigError(
                f"{num_live} episodes are to run concurrently, but {self._server.label} has room for {len(opened)}"
                f"{most}: start it with max_concurrent_envs={num_live} or more, or run {len(opened)} concurrently, "
                f"with max_concurrent={len(opened)}, or in training with a smaller generation batch"
            ) from error
        self._num_proven = num_live

    def check_seed(
        self, env_class: str, arguments: Mapping[str, Any], write: Callable[[Mapping[str, Any]], str]
    ) -> None:
        """Warn, once per server and class, if two resets with the same seed have different observations.

        Raises:
            EnvError: The server cannot be reached, is full, or cannot create an environment.
        """
        key = (self._server, env_class)
        with _checked_lock:
            if key in _checked:
                return
            _checked.append(key)
        try:
            connection = self.connect()
        except BaseException:
            _checked.remove(key)
            raise
        try:
            texts = [write(connection.reset({**arguments, "seed": _SEED})["observation"]) for _ in range(2)]
        except EnvError as error:  # if a task cannot be reset, only its episodes fail
            logger.warning("cannot check whether %s respects seeds: %s", self._server.label, sentence_of(error))
            return
        finally:
            connection.close()
        if texts[0] != texts[1]:
            logger.warning(
                "%s does not respect the seed passed to reset: two resets with the seed %d returned %s and %s. "
                "Therefore, the rollouts of a task start differently, baselines over a task group compare different "
                "starts, and runs are not reproducible",
                self._server.label,
                _SEED,
                shown(texts[0], 100),
                shown(texts[1], 100),
            )

    def close(self) -> None:
        """Close all connections, and stop a program that was started here; do nothing in a forked process."""
        if self.pid != os.getpid():
            return
        for session_id in [*self._sessions]:
            self.end(session_id)
        with self._lock:
            local, self._local = self._local, None
            self._num_proven = 0
        if local is not None:
            local.stop()
