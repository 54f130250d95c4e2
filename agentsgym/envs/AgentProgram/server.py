"""The HTTP endpoint that programs call: one for each process, on the agents' event loop.

It listens on 127.0.0.1, and accepts only requests with the key of a session, for its own host name, and not from web
pages. Bodies are limited in size and time, and so are the headers of a new connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.envs.AgentProgram import SPEC
from agentsgym.envs.AgentProgram.calls import CallError, CallRequest, Reply
from agentsgym.envs.AgentProgram.dialects import DIALECTS, Dialect, answer_message
from agentsgym.envs.AgentProgram.session import Session
from agentsgym.errors import ConfigError
from agentsgym.texts import sentence_of
from agentsgym.types import Message

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST: Final = "127.0.0.1"
MODEL: Final = "policy"
_MAX_BODY_BYTES: Final = 8 * 2**20
_SLOW_S: Final = 30.0  # for the headers of a new connection, and for a body
_MAX_CONNECTIONS: Final = 4096
_MAX_STORED: Final = 64  # conversations of /v1/responses that a session can continue by id

PARENT_HEADER: Final = "x-agentsgym-parent"
REWARD_HEADER: Final = "x-agentsgym-reward"
SESSION_HEADER: Final = "x-agentsgym-session"
CALL_HEADER: Final = "x-agentsgym-call"


Opener = Callable[[str], Awaitable[Session]]


class PolicyEndpoint:
    """The endpoint of this process.

    Attributes:
        url: Its address, without a path.
        sessions: The sessions of running programs, by key.
        openers: Functions that return the session of a name, for keys that several sessions share.
    """

    def __init__(self) -> None:
        self.url = ""
        self.sessions: dict[str, Session] = {}
        self.openers: dict[str, Opener] = {}
        self._conversations: dict[str, dict[str, Sequence[Message]]] = {}
        self._serving: asyncio.Task[None] | None = None

    def open(self) -> Session:
        """Open a session with a key of its own."""
        session = Session()
        self.sessions[session.key] = session
        return session

    def forget(self, session: Session) -> None:
        """Accept no more requests of a session."""
        self.sessions.pop(session.key, None)
        self._conversations.pop(session.key, None)

    async def start(self, port: int = 0) -> None:
        """Listen on a port; 0 picks a free one.

        Raises:
            OSError: The port cannot be used.
            MissingDependencyError: The packages ``starlette`` and ``uvicorn`` are not installed.
        """
        uvicorn: Any = SPEC.load("uvicorn")
        listener = socket.create_server((HOST, port), backlog=1024)
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._app(),
            http=_protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=60,
        )
        server = uvicorn.Server(config)
        self._serving = serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:
            if serving.done():
                serving.result()
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop listening, and end every connection."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])

    def _app(self) -> Any:
        from starlette.applications import Starlette  # noqa: PLC0415  # an extra
        from starlette.routing import Route  # noqa: PLC0415

        handlers: dict[str, tuple[Callable[..., Awaitable[Response]], Dialect, str]] = {
            dialect.path: (self._call, dialect, "POST") for dialect in DIALECTS
        }
        handlers["/v1/reward"] = (self._reward, DIALECTS[0], "POST")
        handlers["/v1/models"] = (self._models, DIALECTS[0], "GET")
        return Starlette(
            routes=[
                Route(path, self._guarded(handler, dialect), methods=[method])
                for path, (handler, dialect, method) in handlers.items()
            ]
        )

    def _guarded(self, handler: Callable[..., Awaitable[Response]], dialect: Dialect) -> Any:
        """Check where a request comes from, and turn a rejection into the error of the API."""

        async def respond(request: Request) -> Response:
            try:
                return await handler(request, await self._session(request), dialect)
            except CallError as error:
                return _json(dialect.error(error), error.status)

        return respond

    async def _session(self, request: Request) -> Session:
        hosts = request.headers.getlist("host")
        port = self.url.rpartition(":")[2]
        if len(hosts) != 1 or hosts[0].lower() not in {f"{HOST}:{port}", f"localhost:{port}"}:
            raise CallError("requests for other host names are rejected", status=403)
        if "origin" in request.headers:
            raise CallError("requests from web pages are rejected", status=403)
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        session = self.sessions.get(key)
        if key in self.openers:
            session = await self.openers[key](request.headers.get(SESSION_HEADER, ""))
        if session is None:
            raise CallError("the API key is not that of a running session", status=401, code="invalid_api_key")
        return session

    async def _models(self, request: Request, session: Session, dialect: Dialect) -> Response:
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentsgym"}
        return _json({"object": "list", "data": [entry]})

    async def _reward(self, request: Request, session: Session, dialect: Dialect) -> Response:
        body = await _body(request)
        if not body.keys() <= {"reward", "call", "final"} or not body:
            raise CallError('a reward must be {"reward": number or object, "call": id, "final": true}, each optional')
        call_id = body.get("call")
        if not isinstance(call_id, str | None):
            raise CallError("call must be the id of a call", param="call")
        if "reward" in body:
            session.add_reward(_number_or_named(body["reward"], "reward"), call_id)
        if body.get("final") is True:
            session.finish_rewards()
        return _json({"object": "reward"})

    async def _call(self, request: Request, session: Session, dialect: Dialect) -> Response:
        stored = self._conversations.setdefault(session.key, {})
        call = dialect.parse(await _body(request), stored.get)
        reward = request.headers.get(REWARD_HEADER)
        if reward is not None:
            session.add_reward(_number_in_header(reward))
        parent = request.headers.get(PARENT_HEADER)
        answering = asyncio.ensure_future(session.call(call, parent))
        leaving = asyncio.ensure_future(_until_disconnected(request))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise CallError("the client closed the connection", status=499)
            replies = answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
        if call.messages:
            _store(stored, call, replies)
        return _response(dialect, call, replies)


def _store(stored: dict[str, Sequence[Message]], call: CallRequest, replies: Sequence[Reply]) -> None:
    """Keep the conversations that ``previous_response_id`` may continue."""
    for reply in replies:
        stored[reply.call_id] = [*call.messages, answer_message(reply)]
    while len(stored) > _MAX_STORED:
        del stored[next(iter(stored))]


def _response(dialect: Dialect, call: CallRequest, replies: Sequence[Reply]) -> Response:
    from starlette.responses import Response  # noqa: PLC0415  # an extra

    created = int(time.time())
    headers = {CALL_HEADER: replies[0].call_id}
    if call.streams:
        text = "".join(dialect.stream(call, replies, created))
        return Response(text, headers={**headers, "cache-control": "no-store"}, media_type="text/event-stream")
    return _json(dialect.respond(call, replies, created), headers=headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response  # noqa: PLC0415  # an extra

    body = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Response(body, status, headers, "application/json")


async def _body(request: Request) -> dict[str, Any]:
    """Read the JSON object in the body of a request, within the limits of size and time."""
    raw = bytearray()
    try:
        async with asyncio.timeout(_SLOW_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > _MAX_BODY_BYTES:
                    raise CallError(f"the body must not be larger than {_MAX_BODY_BYTES} bytes", status=413)
    except TimeoutError as error:
        raise CallError(f"the body was not received within {_SLOW_S:g} s", status=408) from error
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CallError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallError("the body must be a JSON object")
    return cast("dict[str, Any]", value)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_finite(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300 and math.isfinite(value)
    )


def _number_or_named(value: Any, name: str) -> float | dict[str, float]:
    """Check a reward: a number, or an object of numbers by name."""
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        if named and all(name and _is_finite(one) for name, one in named.items()):
            return {key: float(one) for key, one in named.items()}
    elif _is_finite(value):
        return float(value)
    raise CallError(f"{name} must be a finite number, or an object of finite numbers by name", param=name)


def _number_in_header(value: str) -> float | dict[str, float]:
    try:
        return _number_or_named(json.loads(value), REWARD_HEADER)
    except (ValueError, RecursionError) as error:
        raise CallError(f"the header {REWARD_HEADER} must be a number or a JSON object of numbers") from error


def _protocol() -> Any:
    """The class of connections: uvicorn's, with a time limit for the first headers."""
    from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: PLC0415  # an extra

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(_SLOW_S, self._close_if_slow)

        def _close_if_slow(self) -> None:
            if self.cycle is None:  # pyright: ignore[reportUnnecessaryComparison]  # before the first request
                self.transport.close()

    return Protocol


_current: tuple[asyncio.AbstractEventLoop, asyncio.Task[PolicyEndpoint]] | None = None


async def current_endpoint(port: int = 0) -> PolicyEndpoint:
    """Return the endpoint of this process, which is started at the first call (and again in a forked process).

    Args:
        port: The port to listen on if it is started; 0 picks a free one.

    Raises:
        ConfigError: The port cannot be used.
    """
    global _current  # noqa: PLW0603  # one endpoint per process
    loop = asyncio.get_running_loop()
    if _current is None or _current[0] is not loop or (_current[1].done() and _current[1].exception()):
        _current = loop, loop.create_task(_started(port))
    return await asyncio.shield(_current[1])


async def _started(port: int) -> PolicyEndpoint:
    made = PolicyEndpoint()
    try:
        await made.start(port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port {port} of {HOST} cannot be used: {sentence_of(error)}") from error
    return made
