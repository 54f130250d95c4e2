"""One connection to an OpenEnv server, which is one environment: JSON messages over a WebSocket, each with an answer.

::

    {"type": "reset", "data": {"seed": 7}}      ─▶  {"type": "observation", "data": {"observation": {…}, "reward": …}}
    {"type": "step", "data": {"message": "a"}}  ─▶  {"type": "observation", "data": {…}} or {"type": "error", …}
    {"type": "state"}                           ─▶  {"type": "state", "data": {…}}
    {"type": "close"}                           ─▶  the server ends the game and the connection

A connection that broke stays broken: the server has dropped its game, and another connection would be another game.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Never, cast

from agentsgym.envs.OpenEnv import SPEC
from agentsgym.envs.OpenEnv.server import OpenEnvServer, address_of, is_local
from agentsgym.errors import EnvError
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_CLOSING_S = 2.0  # how long a server may take to end a game before it is left to itself
_REFUSALS = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})  # there is no game
_NOT_UNDERSTOOD = frozenset({"UNKNOWN_TYPE", "INVALID_JSON"})


class RefusedActionError(Exception):
    """The server refused one message and the game goes on.

    Attributes:
        code: ``"VALIDATION_ERROR"``, ``"EXECUTION_ERROR"`` or another of the server's.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class FullServerError(EnvError):
    """The server has as many sessions as it takes.

    Attributes:
        max_sessions: How many that is; None if it did not say.
    """

    def __init__(self, sentence: str, max_sessions: int | None) -> None:
        super().__init__(sentence)
        self.max_sessions = max_sessions


class Connection:
    """One game on a server; used by one thread at a time.

    Attributes:
        problem: Why nothing can be asked any more; None while it is open.
    """

    def __init__(self, server: OpenEnvServer, url: str) -> None:
        """Connect, and find out whether the server has room: a full one says so only when it is asked something.

        Args:
            server: The server.
            url: Where it runs; that of a program is known once it runs.

        Raises:
            ConfigError: A header's environment variable is not set.
            FullServerError: The server has as many sessions as it takes.
            EnvError: It cannot be reached, makes no game, or does not speak the protocol.
        """
        self.problem: str | None = None
        self._server = server
        self._is_over = True  # until a reset
        self._closed = load_closed()
        self._opened = contextlib.ExitStack()  # websockets means its connections to be entered and left
        self._socket = self._opened.enter_context(_connected(server, url))
        try:
            self._ask("state", None, server.connect_timeout_s)
        except RefusedActionError as error:
            if error.code in _NOT_UNDERSTOOD:
                self._break(f"does not know 'state': {sentence_of(error)} (is its protocol another version?)")
            # else a game that says nothing of its state before a reset: it is there

    def reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the game anew: ``observation`` (a dict), ``reward`` (a number or None), ``done``, maybe ``metadata``.

        Raises:
            EnvError: The connection broke, or the server refused.
        """
        try:
            answer = self._ask("reset", arguments, self._server.reset_timeout_s)
        except RefusedActionError as error:
            raise EnvError(f"{self._server.label} could not reset the environment: {sentence_of(error)}") from error
        self._is_over = answer["done"]
        if self._is_over:
            raise EnvError(f"{self._server.label} returned done=True from a reset")
        return answer

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Play one action; what is given is as for :meth:`reset`.

        Raises:
            RefusedActionError: The server refused the action; the game goes on.
            EnvError: The connection broke, or the game is over or was not begun.
        """
        if self._is_over and action.get("type") != "list_tools":
            raise EnvError(f"cannot send a step to {self._server.label}: the episode is over or was not reset")
        answer = self._ask("step", action, self._server.step_timeout_s)
        self._is_over = self._is_over or answer["done"]
        return answer

    def close(self) -> None:
        """End the game, and wait a moment for the server, which has room for another one only then."""
        if self.problem is None:
            self.problem = "was closed"
            with contextlib.suppress(Exception):  # whatever is wrong with it, nobody needs it any more
                self._socket.send('{"type": "close"}')
                self._socket.recv(timeout=_CLOSING_S)  # raises as the server closes the connection
        self._drop()

    def _ask(self, kind: str, data: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any]:
        if self.problem is not None:
            raise EnvError(f"{self._server.label} {self.problem}")
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        raw = self._exchanged(kind, json.dumps(message), limit_s)
        try:
            answer: Any = json.loads(raw)
        except (ValueError, RecursionError):
            self._break(f"answered {kind!r} with invalid JSON: {shown(raw, 100)}")
        if isinstance(answer, dict):
            fields = cast("dict[str, Any]", answer)
            if fields.get("type") == "error":
                self._raise(fields.get("data"))
            data = fields.get("data")
            if isinstance(data, dict) and (kind == "state" or _is_observation(data)):
                return data
        said = shown(cast("object", answer), 200)
        self._break(f"answered {kind!r} with what is no answer to it: {said} (is its protocol another version?)")

    def _exchanged(self, kind: str, message: str, limit_s: float) -> str | bytes:
        """Send a message and receive one; what the server said before it hung up comes first."""
        closed = self._closed
        try:
            with contextlib.suppress(closed):  # what it said last is to be read
                self._socket.send(message)
            return self._socket.recv(timeout=limit_s)
        except TimeoutError:
            self._break(f"took longer than {limit_s:g} s to answer {kind!r}, and was given up")
        except closed as error:
            self._break(f"broke the connection off at {kind!r}: {sentence_of(error)}")
        except OSError as error:
            self._break(f"cannot be reached any more: {sentence_of(error)}")

    def _raise(self, data: Any) -> Never:
        """Say what the server says is wrong."""
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {"message": shown(data)}
        code = str(fields.get("code"))
        said = str(fields.get("message"))[:1000]
        if code == "CAPACITY_REACHED":
            most = fields.get("max_sessions")
            taken = f"{fields.get('active_sessions', 'all')} of its {most} sessions are" if most else "all sessions are"
            self.problem = f"is full: {taken} taken"
            self._drop()
            raise FullServerError(f"{self._server.label} {self.problem}", most if isinstance(most, int) else None)
        if code in _REFUSALS:
            self._break(f"could not create an environment: {said} ({code})")
        raise RefusedActionError(code, _with_details(said, fields.get("errors")))

    def _break(self, problem: str) -> Never:
        self.problem = problem
        self._drop()
        raise EnvError(f"{self._server.label} {problem}")

    def _drop(self) -> None:
        """Close the socket."""
        with contextlib.suppress(Exception):
            self._opened.close()


def load_closed() -> type[Exception]:
    """Give the error of a connection that ended."""
    from websockets.exceptions import ConnectionClosed  # noqa: PLC0415  # an extra

    return ConnectionClosed


class _StatusError(Exception):
    """The server answered the opening of a connection with another HTTP status, which the error holds."""


@functools.cache
def _direct_connection() -> Any:
    """Give the class of a connection that follows no redirect: headers may hold a secret, for the server alone."""
    from websockets.exceptions import InvalidStatus  # noqa: PLC0415  # an extra

    base = SPEC.load("websockets.sync.client").ClientConnection

    def handshake(self: Any, *args: Any, **options: Any) -> None:
        try:
            base.handshake(self, *args, **options)
        except InvalidStatus as error:  # websockets would look for a redirect in it
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
            ping_timeout=None,  # a step may block the server; its own limit of time says when it is too long
            close_timeout=_CLOSING_S,
            create_connection=_direct_connection(),
            **({"proxy": None} if is_local(url) else {}),
        )
    except _StatusError as error:
        (status,) = error.args
        hint = "are its headers right?" if status in {401, 403} else "is it an OpenEnv server?"
        raise EnvError(f"{server.label} answered {address} with HTTP status {status}: {hint}") from error
    except TimeoutError as error:
        raise EnvError(f"{server.label} did not answer within {server.connect_timeout_s:g} s") from error
    except WebSocketException as error:
        raise EnvError(f"{server.label} is not a WebSocket server: {sentence_of(error)}") from error
    except OSError as error:
        raise EnvError(f"{server.label} cannot be reached: {sentence_of(error)} (is it running?)") from error


def _is_observation(data: Any) -> bool:
    fields = cast("dict[str, Any]", data)
    reward, done = fields.get("reward"), fields.get("done", False)
    if not isinstance(fields.get("observation"), dict) or not isinstance(done, bool):
        return False
    fields.update(reward=reward, done=done)  # a server may leave out what is not there
    return reward is None or isinstance(reward, int | float)


def _with_details(said: str, errors: Any) -> str:
    """Name the fields that a validation complains of, the first few of them."""
    if not isinstance(errors, list):
        return said
    details: list[str] = []
    for one in cast("list[Any]", errors)[:5]:
        fields = cast("dict[str, Any]", one) if isinstance(one, dict) else {}
        place: Any = fields.get("loc")
        where = ".".join(map(str, cast("list[Any]", place))) if isinstance(place, list) else ""
        details.append(f"{where}: {fields.get('msg')}" if where else str(fields.get("msg")))
    return f"{said}: {'; '.join(details)}" if details else said
