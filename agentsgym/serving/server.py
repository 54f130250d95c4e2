"""Serve environments over OpenEnv's protocol: a session per WebSocket connection, and schemas over HTTP.

The server listens on 127.0.0.1 unless another address is given. It rejects requests for other host names and all
requests from web pages, so that no site that a browser visits can play.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from agentsgym.envs.OpenEnv import SPEC
from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, require
from agentsgym.interruptions import Terminated
from agentsgym.serving.served_env import ServedEnv
from agentsgym.serving.session import Session, error_message
from agentsgym.texts import sentence_of

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

logger = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
MAX_MESSAGE_BYTES: Final = 2**20
_LOOPBACK: Final = (HOST, "localhost", "::1")
_CLOSING_S: Final = 2.0  # time limit for a client to confirm that a connection is closed
_PING_S: Final = 60.0  # the operating system closes connections whose pings are never acknowledged


class EpisodeServer:
    """A server of one or more environments."""

    def __init__(self, envs: Mapping[str, ServedEnv], *, max_sessions: int = 256, num_threads: int = 1) -> None:
        """Set the limits; :meth:`listening` opens the port.

        Args:
            envs: The environments by name. Each is at the path ``/NAME``; a single one is also at ``/``.
            max_sessions: Maximum number of concurrent sessions of all environments.
            num_threads: Number of steps that run concurrently. With 1, all run in the thread that calls; with more, the
                environments' hooks must be thread-safe.

        Raises:
            ConfigError: There is no environment, or a number is not a positive int.
        """
        require("envs", envs, bool, "at least one environment")
        require("max_sessions", max_sessions, is_int(1), "a positive int")
        require("num_threads", num_threads, is_int(1), "a positive int")
        self._routes = {f"/{name}": served for name, served in envs.items()}
        if len(envs) == 1:
            self._routes[""] = next(iter(envs.values()))
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._threads = ThreadPoolExecutor(num_threads, "served-env") if num_threads > 1 else None
        self._hosts: frozenset[str] | None = None  # None for any

    @asynccontextmanager
    async def listening(self, host: str = HOST, port: int = 0) -> AsyncGenerator[str]:
        """Accept connections during the ``with`` block, then end all sessions; yields the URL.

        Args:
            host: The address to listen on.
            port: The port; 0 picks a free one.

        Raises:
            ConfigError: The address cannot be used.
            MissingDependencyError: The package ``websockets`` is not installed.
        """
        websockets = SPEC.load("websockets.asyncio.server")
        try:
            listener = await websockets.serve(
                self._play,
                host,
                port,
                process_request=self._answer,
                compression=None,
                max_size=MAX_MESSAGE_BYTES,
                ping_interval=_PING_S,
                ping_timeout=None,  # a step may block the client or this server for longer
                close_timeout=_CLOSING_S,
                server_header=None,
                logger=logging.Logger("websockets", logging.CRITICAL),  # invalid requests would log tracebacks
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} of {host} cannot be used: {sentence_of(error)}") from error
        async with listener:
            port = next(iter(listener.sockets)).getsockname()[1]
            names = [f"[{name}]" if ":" in name else name for name in (host, *_LOOPBACK)]
            if host in _LOOPBACK:
                self._hosts = frozenset(name if port == 80 else f"{name}:{port}" for name in names)
            yield f"http://{names[0]}:{port}"
        if self._threads is not None:
            self._threads.shutdown()

    async def _play(self, connection: ServerConnection) -> None:
        """Play a connection's session until either side closes it."""
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415  # an extra

        if self._num_sessions >= self._max_sessions:
            sentence = f"the server is full: its {self._max_sessions} sessions are taken"
            counts = {"active_sessions": self._num_sessions, "max_sessions": self._max_sessions}
            with contextlib.suppress(ConnectionClosed):
                await connection.send(error_message("CAPACITY_REACHED", sentence, **counts))
            return
        self._num_sessions += 1
        session = Session(self._routes[_split(connection.request)[0]])
        try:
            async for raw in connection:
                response = await self._run(session.respond, raw)
                if response is None:
                    break
                await connection.send(response)
        except ConnectionClosed:
            pass
        except Exception:
            logger.exception("a session ended because of a bug in agentsgym")
            raise
        finally:
            try:
                await self._run(session.close)
            finally:
                self._num_sessions -= 1

    async def _run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._threads is None:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer an HTTP request; None accepts a WebSocket connection."""
        given = request.headers.get_all("Host")
        if self._hosts is not None and (len(given) != 1 or given[0].lower() not in self._hosts):
            return _json(connection, HTTPStatus.FORBIDDEN, {"error": "requests for other host names are rejected"})
        if "Origin" in request.headers:
            return _json(connection, HTTPStatus.FORBIDDEN, {"error": "requests from web pages are rejected"})
        prefix, leaf = _split(request)
        served = self._routes.get(prefix)
        if leaf == "health" and (served is not None or not prefix):
            return _json(connection, HTTPStatus.OK, {"status": "healthy"})
        if leaf == "schema" and served is not None:
            return _json(connection, HTTPStatus.OK, served.schemas())
        if leaf == "ws" and served is not None:
            return None
        known = ", ".join(f"{route}/ws" for route in self._routes)
        sentence = f"there is nothing at this path; the environments are at {known}"
        return _json(connection, HTTPStatus.NOT_FOUND, {"error": sentence})


def serve(server: EpisodeServer, *, host: str = HOST, port: int = 0, on_ready: Callable[[str], None] = print) -> None:
    """Serve environments until Ctrl-C or SIGTERM, then end all sessions.

    Args:
        server: The server.
        host: The address to listen on.
        port: The port; 0 picks a free one.
        on_ready: A function that is called with the server's URL once it accepts connections.

    Raises:
        ConfigError: The address cannot be used.
        Terminated: The process received SIGTERM.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        terminated: asyncio.Future[None] = loop.create_future()
        with contextlib.suppress(NotImplementedError):  # on Windows
            loop.add_signal_handler(signal.SIGTERM, lambda: terminated.done() or terminated.set_result(None))
        async with server.listening(host, port) as url:
            on_ready(url)
            await terminated
        raise Terminated

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


def _split(request: Request | None) -> tuple[str, str]:
    """Return the path of an environment and the last part of a request's path."""
    path = "" if request is None else request.path
    prefix, _, leaf = unquote(urlsplit(path).path).rpartition("/")
    return prefix, leaf


def _json(connection: ServerConnection, status: HTTPStatus, value: Any) -> Response:
    response = connection.respond(status, json.dumps(value))
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = "application/json"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response
