"""What an environment holds in one process: its server, if that was started here, and the games in play."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from agentsgym.envs.OpenEnv.local import LocalServer
from agentsgym.envs.OpenEnv.server import OpenEnvServer
from agentsgym.envs.OpenEnv.wire import Connection, FullServerError
from agentsgym.errors import ConfigError, EnvError
from agentsgym.texts import sentence_of

_FULL_GRACE_S = 1.0  # a server may still be ending a game that was closed
_RETRY_S = 0.05
_MOST_OPENERS = 16  # connections that are opened at once


class Link:
    """Made at first use in each process.

    Attributes:
        pid: The process it belongs to.
    """

    def __init__(self, server: OpenEnvServer, url: str | None = None) -> None:
        """Take the server.

        Args:
            server: Where games are played.
            url: Where a program of another process answers already; None where this one is to start it.
        """
        self.pid = os.getpid()
        self._server = server
        self._url = server.url or url
        self._local: LocalServer | None = None
        self._lock = threading.Lock()
        self._games: dict[str, Connection] = {}
        self._num_proven = 0

    @property
    def known_url(self) -> str | None:
        """Where the server answers; None for a program that does not run yet."""
        return self._url or (None if self._local is None else self._local.url)

    def url(self) -> str:
        """Give where the server answers; a program is started at first, and where it has ended.

        Raises:
            ConfigError: An environment variable of its headers is not set.
            EnvError: It cannot be started.
        """
        if self._url is not None:
            return self._url
        with self._lock:
            if self._local is None or not self._local.is_running():
                self._local = LocalServer(self._server, None if self._local is None else self._local.port)
            return self._local.url

    def connect(self) -> Connection:
        """Open a connection that no session has yet.

        Raises:
            EnvError: The server cannot be reached, is full, or makes no game.
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
        """Open a session's connection; one that it had before is closed."""
        self.end(session_id)
        game = self._games[session_id] = self.connect()
        return game

    def game(self, session_id: str) -> Connection:
        """Find a session's connection.

        Raises:
            EnvError: It has none.
        """
        if session_id not in self._games:
            raise EnvError(f"{self._server.label} has no episode of this session: call _initialize_episode first")
        return self._games[session_id]

    def end(self, session_id: str) -> None:
        """Close a session's connection, if it has one."""
        game = self._games.pop(session_id, None)
        if game is not None:
            game.close()

    def check_capacity(self, num_live: int) -> None:
        """Find out whether the server plays so many games at once: by opening them, since it does not say.

        Raises:
            ConfigError: It does not.
            EnvError: It cannot be reached, or makes no game.
        """
        if num_live <= self._num_proven:
            return
        opened = [self.connect()]
        try:
            with ThreadPoolExecutor(min(_MOST_OPENERS, num_live)) as openers:
                futures = [openers.submit(self.connect) for _ in range(num_live - 1)]
                done, left = wait(futures, return_when=FIRST_EXCEPTION)
                for future in left:
                    future.cancel()
            opened += [one.result() for one in futures if _has_opened(one)]
            errors = [error for one in done if (error := one.exception()) is not None]
        finally:
            with ThreadPoolExecutor(_MOST_OPENERS) as closers:
                list(closers.map(Connection.close, opened))
        if errors:
            raise self._refusal(errors[0], num_live, len(opened)) from errors[0]
        self._num_proven = num_live

    def _refusal(self, error: BaseException, num_live: int, num_opened: int) -> BaseException:
        if not isinstance(error, FullServerError):
            return error
        most = "" if error.max_sessions is None else f" (its limit is {error.max_sessions} in all)"
        return ConfigError(
            f"{num_live} episodes are to be live at once, and {self._server.label} has room for {num_opened}{most}: "
            f"start it with max_concurrent_envs={num_live} or more, or let {num_opened} be live at once: by "
            f"max_concurrent={num_opened}, in training by a smaller generation batch"
        )

    def close(self) -> None:
        """Close all connections and stop a program that was started here; nothing in a process that was forked off."""
        if self.pid != os.getpid():
            return
        for session_id in [*self._games]:
            self.end(session_id)
        with self._lock:
            local, self._local = self._local, None
            self._num_proven = 0
        if local is not None:
            local.stop()


def _has_opened(future: Future[Connection]) -> bool:
    return not future.cancelled() and future.exception() is None


def as_config_error(error: EnvError) -> ConfigError:
    """Say before play what would be an episode's failure in it."""
    return ConfigError(sentence_of(error, 4000))
