"""Connect to an environment on an OpenEnv server: JSON messages over a WebSocket, each with a response.

::

    {"type": "reset", "data": {"seed": 7}}      ─▶  {"type": "observation", "data": {"observation": {…}, "reward": …}}
    {"type": "step", "data": {"message": "a"}}  ─▶  {"type": "observation", "data": {…}} or {"type": "error", …}
    {"type": "state"}                           ─▶  {"type": "state", "data": {…}}
    {"type": "close"}                           ─▶  the server closes the environment and the connection

A broken connection stays broken: the server has discarded its environment, and a new connection gets a new one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Never, cast

from agentsgym.envs.OpenEnv import SPEC
from agentsgym.envs.OpenEnv.conversion import as_fields
from agentsgym.envs.OpenEnv.server import OpenEnvServer, address_of, is_local
from agentsgym.errors import EnvError
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_CLOSING_S = 2.0  # time limit for a server to close an environment
_NO_ENVIRONMENT = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})  # none was created
_NOT_UNDERSTOOD = frozenset({"UNKNOWN_TYPE", "INVALID_JSON"})


class RejectedActionError(Exception):
    """The server rejected a message; the episode continues.

    Attributes:
        code: The server's error code, such as ``"VALIDATION_ERROR"`` or ``"EXECUTION_ERROR"``.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class FullServerError(EnvError):
    """The server has reached its maximum number of sessions.

    Attributes:
        max_sessions: The maximum number; None if the server did not report it.
    """

    def __init__(self, sentence: str, max_sessions: int | None) -> None:
        super().__init__(sentence)
        self.max_sessions = max_sessions


class Connection:
    """A connection to one environment on a server; may be used by only one thread at a time.

    Attributes:
        problem: The reason why the connection cannot be used; None while it is open.
    """

    def __init__(self, server: OpenEnvServer, url: str) -> None:
        """Connect, and request the state, since a full server reports this only in a response.

        Raises:
            ConfigError: A header's environment variable is not set.
            FullServerError: The server has reached its maximum number of sessions.
            EnvError: The server cannot be reached, cannot create an environment, or violates the protocol.
        """
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415  # an extra

        self.problem: str | None = None
        self._server = server
        self._is_over = True  # until a reset
        self._closed = ConnectionClosed
        self._opened = contextlib.ExitStack()  # websockets' connections are context managers
        self._socket = self._opened.enter_context(_connected(server, url))
        try:
            self._ask("state", None, server.connect_timeout_s)
        except RejectedActionError as error:
            if error.code in _NOT_UNDERSTOOD:
                self._break(f"does not support 'state': {sentence_of(error)} (does it use another protocol version?)")
            # other errors: the environment exists, but has no state before a reset

    def reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Start an episode.

        Returns:
            ``observation`` (a dict), ``reward`` (a number or None), ``done``, and possibly ``metadata``.
        """
        try:
            answer = self._ask("reset", arguments, self._server.reset_timeout_s)
        except RejectedActionError as error:
            raise EnvError(f"{self._server.label} could not reset the environment: {sentence_of(error)}") from error
        self._is_over = answer["done"]
        if self._is_over:
            raise EnvError(f"{self._server.label} returned done=True from a reset")
        return answer

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Take one action; the result has the form of :meth:`reset`'s.

        Raises:
            RejectedActionError: The server rejected the action; the episode continues.
            EnvError: The connection broke, or the episode has ended or was not started.
        """
        if self._is_over and action.get("type") != "list_tools":
            raise EnvError(f"cannot send a step to {self._server.label}: the episode has ended or was not reset")
        answer = self._ask("step", action, self._server.step_timeout_s)
        self._is_over = self._is_over or answer["done"]
        return answer

    def close(self) -> None:
        """Close the environment, and wait briefly until the server has room for another one."""
        if self.problem is None:
            self.problem = "was closed"
            with contextlib.suppress(Exception):  # the connection may be broken already
                self._socket.send('{"type": "close"}')
                self._socket.recv(timeout=_CLOSING_S)  # raises when the server closes the connection
        self._drop()

    def _ask(self, kind: str, data: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any]:
        """Send a message and return the data of the server's response."""
        if self.problem is not None:
            raise EnvError(f"{self._server.label} {self.problem}")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        raw = self._exchanged(kind, json.dumps(message), limit_s)
        try:
            answer: Any = json.loads(raw)
        except (ValueError, RecursionError):
            self._break(f"responded to {kind!r} with invalid JSON: {shown(raw, 100)}")
        fields = as_fields(answer)
        if fields.get("type") == "error":
            self._raise(fields.get("data"))
        given = fields.get("data")
        if isinstance(given, dict):
            result = cast("dict[str, Any]", given)
            if kind == "state":
                return result
            result = {**result, "reward": result.get("reward"), "done": result.get("done", False)}
            reward_fits = result["reward"] is None or isinstance(result["reward"], int | float)
            if reward_fits and isinstance(result["done"], bool) and isinstance(result.get("observation"), dict):
                return result
        received = shown(cast("object", answer), 200)
        self._break(f"returned an invalid response to {kind!r}: {received} (does it use another protocol version?)")

    def _exchanged(self, kind: str, message: str, limit_s: float) -> str | bytes:
        """Send a message and receive one, possibly a message that the server sent before it closed the connection."""
        try:
            with contextlib.suppress(self._closed):  # the server's last message can still be received
                self._socket.send(message)
            return self._socket.recv(timeout=limit_s)
        except TimeoutError:
            self._break(f"did not respond to {kind!r} within {limit_s:g} s; the connection was closed")
        except self._closed as error:
            self._break(f"closed the connection during {kind!r}: {sentence_of(error)}")
        except OSError as error:
            self._break(f"can no longer be reached: {sentence_of(error)}")

    def _raise(self, data: Any) -> Never:
        fields = as_fields(data) or {"message": shown(data)}
        code, message = str(fields.get("code")), str(fields.get("message"))[:1000]
        if code == "CAPACITY_REACHED":
            most = fields.get("max_sessions")
            taken = f"{fields.get('active_sessions', 'all')} of its {most} sessions are" if most else "all sessions are"
            self.problem = f"is full: {taken} taken"
            self._drop()
            raise FullServerError(f"{self._server.label} {self.problem}", most if isinstance(most, int) else None)
        if code in _NO_ENVIRONMENT:
            self._break(f"could not create an environment: {message} ({code})")
        errors = fields.get("errors")
        details: list[str] = []  # the first few fields that failed validation
        for one in map(as_fields, cast("list[Any]", errors)[:5] if isinstance(errors, list) else []):
            place: Any = one.get("loc")
            where = ".".join(map(str, cast("list[Any]", place))) if isinstance(place, list) else ""
            details.append(f"{where}: {one.get('msg')}" if where else str(one.get("msg")))
        raise RejectedActionError(code, f"{message}: {'; '.join(details)}" if details else message)

    def _break(self, problem: str) -> Never:
        self.problem = problem
        self._drop()
        raise EnvError(f"{self._server.label} {problem}")

    def _drop(self) -> None:
        with contextlib.suppress(Exception):
            self._opened.close()


class _StatusError(Exception):
    """The server rejected the connection with an HTTP status, the error's only argument."""


@functools.cache
def _direct_connection() -> Any:
    """Return a connection class that follows no redirects: headers may contain a secret for only this server."""
    from websockets.exceptions import InvalidStatus  # noqa: PLC0415  # an extra

    base = SPEC.load("websockets.sync.client").ClientConnection

    def handshake(self: Any, *args: Any, **options: Any) -> None:
        try:
            base.handshake(self, *args, **options)
        except InvalidStatus as error:  # otherwise, websockets might follow a redirect
            raise _StatusError(error.response.status_code) from error

    return type("DirectConnection", (base,), {"handshake": handshake})


def _connected(server: OpenEnvServer, url: str) -> AbstractContextManager[ClientConnection]:
    client = SPEC.load("websockets.sync.client")
    from websockets.exceptions import WebSocketException  # noqa: PLC0415  # an extra

    address = address_of(url, "ws", "ws")
    try:
        return client.connect(
            address,
            additional_headers=server.request_headers(),
            open_timeout=server.connect_timeout_s,
            max_size=server.max_message_bytes,
            ping_timeout=None,  # a step may block the server, and has a separate time limit
            close_timeout=_CLOSING_S,
            create_connection=_direct_connection(),
            **({"proxy": None} if is_local(url) else {}),
        )
    except _StatusError as error:
        (status,) = error.args
        hint = "are its headers right?" if status in {401, 403} else "is it an OpenEnv server?"
        raise EnvError(f"{server.label} responded to {address} with HTTP status {status}: {hint}") from error
    except TimeoutError as error:
        raise EnvError(f"{server.label} did not respond within {server.connect_timeout_s:g} s") from error
    except WebSocketException as error:
        raise EnvError(f"{server.label} is not a WebSocket server: {sentence_of(error)}") from error
    except OSError as error:
        raise EnvError(f"{server.label} cannot be reached: {sentence_of(error)} (is it running?)") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: headers may contain a secret that only the server may receive."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def get_json(server: OpenEnvServer, url: str, path: str, *, limit_s: float) -> dict[str, Any]:
    """Request a JSON object from a path on a server, whose complete response may take ``limit_s`` seconds.

    Raises:
        ConfigError: A header's environment variable is not set.
        EnvError: The server does not respond, or its response is not a JSON object.
    """
    address = address_of(url, "http", path)
    request = urllib.request.Request(address, headers={"Accept": "application/json", **server.request_headers()})
    late = f"{server.label} did not send a complete response within {limit_s:g} s"
    handlers = [_NoRedirects, *([urllib.request.ProxyHandler({})] if is_local(url) else [])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=limit_s) as response:
            # urllib applies the limit to each part of the body separately, and there may be many.
            raw, deadline = b"", time.monotonic() + limit_s
            while len(raw) < server.max_message_bytes and (part := response.read1(server.max_message_bytes - len(raw))):
                raw += part
                if time.monotonic() > deadline:
                    raise EnvError(late)
    except urllib.error.HTTPError as error:
        with error:
            raise EnvError(f"{server.label} responded to {address} with HTTP status {error.code}") from error
    except TimeoutError as error:
        raise EnvError(late) from error
    except (OSError, HTTPException) as error:
        raise EnvError(f"{server.label} cannot be reached: {sentence_of(error)} (is it running?)") from error
    try:
        answer: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{server.label} responded to {address} with invalid JSON: {shown(raw, 100)}") from error
    if not isinstance(answer, dict):
        raise EnvError(f"{server.label} responded to {address} with JSON that is not an object: {shown(answer, 100)}")
    return cast("dict[str, Any]", answer)
