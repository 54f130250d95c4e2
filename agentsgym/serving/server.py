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
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote, urlsplit

from agentsgym.envs.OpenEnv import SPEC
from agentsgym.envs.play import EpisodeByHand
from agentsgym.errors import AgentsGymError, ConfigError, TaskError
from agentsgym.failures import headline
from agentsgym.fields import has_str_keys, is_int, require
from agentsgym.interruptions import Terminated
from agentsgym.seeding import fresh_seed
from agentsgym.serving.served_env import ServedEnv, is_text
from agentsgym.texts import sentence_of, shown
from agentsgym.types import Action, Message

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

logger = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
MAX_MESSAGE_BYTES: Final = 2**20
_LOOPBACK: Final = (HOST, "localhost", "::1")
_CLOSING_S: Final = 2.0  # time limit for a client to confirm that a connection is closed
_PING_S: Final = 60.0  # the operating system closes connections whose pings are never acknowledged
_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps would create an encoder for each message
_KINDS = ("reset", "step", "state", "close")


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


class _InvalidMessageError(Exception):
    """A message is not one of the protocol; the arguments are the error's code and its sentence."""


class Session:
    """The episodes of one connection, one after another; used by one thread at a time."""

    def __init__(self, served: ServedEnv) -> None:
        self._served = served
        self._episode: EpisodeByHand | None = None
        self._state: dict[str, Any] = {"episode_id": None, "step_count": 0}

    def respond(self, raw: str | bytes) -> str | None:
        """Return the response to a message; None if the client closes the session."""
        try:
            kind, data = _parsed(raw)
            if kind == "close":
                return None
            if kind == "state":
                return _written("state", self._state)
            return _written("observation", self._reset(data) if kind == "reset" else self._step(data))
        except _InvalidMessageError as error:
            return error_message(*error.args)
        except (ConfigError, TaskError) as error:
            return error_message("VALIDATION_ERROR", sentence_of(error))
        except AgentsGymError as error:
            text = headline(str(error))
            logger.warning("%s", text)
            return error_message("EXECUTION_ERROR", text)

    def close(self) -> None:
        """End the episode, if one is running."""
        if self._episode is not None:
            self._episode.close()
        self._episode = None

    def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        seed = data.get("seed")
        seed = fresh_seed() if seed is None else seed
        trial = self._served.trial({**data, "seed": seed})  # raises before the running episode is closed
        self.close()
        self._state = {"episode_id": data.get("episode_id") or trial.session_id, "step_count": 0}
        self._episode = EpisodeByHand(trial)
        messages = self._episode.observation()
        return _observation({"text": _text_of(messages)}, {"seed": seed, "messages": messages})

    def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if data.get("type") == "list_tools" and self._served.tools:
            return _observation({"tools": self._served.tools}, {})
        action = self._action(data)
        if self._episode is None or self._episode.trajectory is not None:
            sentence = "the episode is over, or there was none yet: send a reset first"
            raise _InvalidMessageError("EXECUTION_ERROR", sentence)
        self._state["step_count"] += 1
        messages, reward, done, info = self._episode.step(action)
        metadata: dict[str, Any] = {key: bool(info[key]) for key in ("success", "invalid") if info.get(key) is not None}
        over = self._episode.trajectory
        if over is not None:
            ending: dict[str, Any] = {"stop_reason": over.stop_reason, "truncated": over.stop_reason.truncated}
            metadata = {**over.metrics, **metadata, **ending, "final_reward": over.final_reward}
        text = _text_of(messages)
        is_call = "tool_name" in data
        fields = {"tool_name": data["tool_name"], "result": text, "error": None} if is_call else {"text": text}
        return _observation(fields, metadata, reward, done=done)

    def _action(self, data: Mapping[str, Any]) -> Action:
        """Convert a step's data to an action: a text or, if there are tools, a call."""
        fields = {key: value for key, value in data.items() if key != "metadata"}  # every action of OpenEnv has it
        message = fields.get("message")
        if isinstance(message, int | float):  # some clients parse the agent's text as JSON
            message = json.dumps(message)
        if fields.keys() == {"message"} and is_text(message):
            return Action(text=str(message))
        call: dict[str, Any] = {"type": "call_tool", "arguments": {}, **fields}
        is_call = call["type"] == "call_tool" and call.keys() == {"type", "tool_name", "arguments"}
        if self._served.tools and is_call and is_text(call["tool_name"]) and isinstance(call["arguments"], dict):
            return self._served.call(call["tool_name"], cast("dict[str, Any]", call["arguments"]))
        form = ' or {"type": "call_tool", "tool_name": NAME, "arguments": {…}}' if self._served.tools else ""
        raise ConfigError(f'the data of a step must be {{"message": TEXT}}{form}, got {shown(dict(data))}')


def error_message(code: str, sentence: str, **details: Any) -> str:
    """Return the response that reports an error."""
    return _written("error", {"message": sentence, "code": code, **details})


def _written(kind: str, data: Mapping[str, Any]) -> str:
    return _encode({"type": kind, "data": data})


def _parsed(raw: str | bytes) -> tuple[str, dict[str, Any]]:
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _InvalidMessageError(
            "INVALID_JSON", f"the message is not valid JSON: {sentence_of(error, 200)}"
        ) from error
    message = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind, data = message.get("type"), message.get("data")
    if kind not in _KINDS:
        expected = "a message must be a JSON object whose 'type' is reset, step, state or close"
        raise _InvalidMessageError("UNKNOWN_TYPE", f"{expected}, got {shown(cast('object', value))}")
    given: Any = {} if data is None and kind != "step" else data
    require(f"the 'data' of a {kind}", given, has_str_keys, "a JSON object")
    return str(kind), given


def _observation(
    fields: Mapping[str, Any], metadata: Mapping[str, Any], reward: float | None = None, *, done: bool = False
) -> dict[str, Any]:
    return {"observation": fields, "reward": reward, "done": done, "metadata": metadata}


def _text_of(messages: Sequence[Message]) -> str:
    return "\n\n".join([message["content"] for message in messages if message["content"]])
