"""The HTTP endpoint that programs call: one for each process, on the agents' event loop.

It listens on 127.0.0.1, and accepts only requests with the key of a session, for its own host name, and not from web
pages. Headers and bodies are limited in size and time, and connections in number. Whatever a client sends, nothing is
logged, except for bugs of the endpoint itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.credit.components import GivenReward
from agentsgym.envs.AgentProgram import SPEC
from agentsgym.envs.AgentProgram.calls import CallError
from agentsgym.envs.AgentProgram.dialects.completions import CHAT, COMPLETIONS
from agentsgym.envs.AgentProgram.dialects.messages import MESSAGES
from agentsgym.envs.AgentProgram.dialects.responses import RESPONSES, carried_over
from agentsgym.envs.AgentProgram.dialects.shared import Dialect
from agentsgym.envs.AgentProgram.session import GONE, NOTHING_TO_REWARD, Session, received_reward
from agentsgym.errors import ConfigError
from agentsgym.texts import sentence_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST: Final = "127.0.0.1"
MODEL: Final = "policy"
_MAX_BODY_BYTES: Final = 8 * 2**20
_SLOW_S = 30.0  # for a body
_MAX_STORED: Final = 64  # conversations of /v1/responses that a session can continue by id

PARENT_HEADER: Final = "x-agentsgym-parent"
REWARD_HEADER: Final = "x-agentsgym-reward"
SESSION_HEADER: Final = "x-agentsgym-session"
CALL_HEADER: Final = "x-agentsgym-call"

Handler = Callable[["Request", Session, Dialect], Awaitable["Response"]]
Opener = Callable[[str], Awaitable[Session]]


class PolicyEndpoint:
    """The endpoint of this process.

    Attributes:
        url: Its address, without a path.
        sessions: The sessions of running programs, by key.
        openers: Functions that return the session of a name, for keys that several sessions share.
        is_listening: Whether it accepts connections.
    """

    def __init__(self) -> None:
        self.url = ""
        self.sessions: dict[str, Session] = {}
        self.openers: dict[str, Opener] = {}
        self.is_listening = False
        self._handlers: dict[str, tuple[str, Handler, Dialect]] = {
            "/v1/reward": ("POST", self._reward, CHAT),
            "/v1/models": ("GET", self._models, CHAT),
            "/v1/messages/count_tokens": ("POST", self._count, MESSAGES),
            **{dialect.path: ("POST", self._call, dialect) for dialect in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)},
        }

    def open(self) -> Session:
        """Open a session, which gets a new key."""
        session = Session()
        self.sessions[session.key] = session
        return session

    def forget(self, session: Session) -> None:
        """Accept no more requests of a session."""
        self.sessions.pop(session.key, None)

    async def start(self, port: int = 0) -> PolicyEndpoint:
        """Listen on a port, 0 for a free one, and return the endpoint.

        Raises:
            ConfigError: The port cannot be used.
            MissingDependencyError: The packages ``starlette`` and ``uvicorn`` are not installed.
        """
        uvicorn: Any = SPEC.load("uvicorn")
        from agentsgym.envs.AgentProgram.connections import Connection  # noqa: PLC0415  # it imports the extra

        try:
            listener = socket.create_server((HOST, port), backlog=1024)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port {port} of {HOST} cannot be used: {sentence_of(error)}") from error
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._app, interface="asgi3", ws="none", lifespan="off", log_config=None, proxy_headers=False
        )
        config.load()
        self._state = state = uvicorn.server.ServerState()
        # Without uvicorn's Server, which is a task that never ends, and which waits for clients before it stops.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(config, state, {}), sock=listener)
        self._listener = listener
        self.is_listening = True
        return self

    async def stop(self) -> None:
        """Stop listening, fail the episodes of running programs, and end every connection."""
        if not self.is_listening:
            return
        self.is_listening = False
        with contextlib.suppress(NotImplementedError):  # by the event loop of Windows
            asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(2):  # a connection that is accepted but not yet made would be lost, open, by closing the server
            await asyncio.sleep(0)
        self._server.close()
        for session in self.sessions.values():
            session.fail("the endpoint that the program calls was stopped")
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=1.0)  # for the last responses to be written
        for connection in [*self._state.connections]:
            connection.transport.close()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """Check where a request comes from, and turn a rejection into the error of the API."""
        from starlette.requests import Request  # noqa: PLC0415  # an extra

        request, path = Request(scope, receive), str(scope["path"])
        unknown = "", self._call, MESSAGES if "/messages" in path else CHAT
        known = "/v1/models" if path.startswith("/v1/models/") else path
        method, handler, dialect = self._handlers.get(known, unknown)
        try:
            response = await handler(request, await self._session(request, method), dialect)
        except CallError as error:
            response = _json(dialect.error(error), error.status, {"allow": method} if error.status == 405 else None)
        await response(scope, receive, send)

    async def _session(self, request: Request, method: str) -> Session:
        """Find the session of a request, which must have the method of its path; empty for an unknown path."""
        hosts = request.headers.getlist("host")
        port = self.url.rpartition(":")[2]
        if len(hosts) != 1 or hosts[0].lower() not in {f"{HOST}:{port}", f"localhost:{port}"}:
            raise CallError("requests for other host names are rejected", status=403)
        if "origin" in request.headers:
            raise CallError("requests from web pages are rejected", status=403)
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        session = self.sessions.get(key)
        if key in self.openers:
            if method == "GET":  # a list of models is requested before there is a session
                return Session()
            session = await self.openers[key](request.headers.get(SESSION_HEADER, ""))
        if session is None:
            raise CallError("the API key is not that of a running session", status=401, code="invalid_api_key")
        if not method:
            raise CallError("there is nothing at this path; the base URL of OpenAI clients ends with /v1", status=404)
        if request.method != method:
            raise CallError(f"{request.method} requests are not answered at this path", status=405)
        return session

    async def _models(self, request: Request, session: Session, dialect: Dialect) -> Response:
        name = request.url.path.removeprefix("/v1/models").removeprefix("/")
        entry: dict[str, Any] = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "agentsgym"}
        whole: dict[str, Any] = {"object": "list"}
        if "anthropic-version" in request.headers:
            created = "1970-01-01T00:00:00Z"
            entry = {"id": name or MODEL, "type": "model", "display_name": name or MODEL, "created_at": created}
            whole = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return _json(entry if name else {**whole, "data": [entry]})

    async def _count(self, request: Request, session: Session, dialect: Dialect) -> Response:
        call = dialect.parse({"max_tokens": 1, **await _body(request)}, session.conversations.get)
        return _json({"input_tokens": session.num_tokens(call)})

    async def _reward(self, request: Request, session: Session, dialect: Dialect) -> Response:
        body = await _body(request)
        if not body.keys() <= {"reward", "call", "final"} or not body:
            raise CallError('a reward must be {"reward": number or object, "call": id, "final": true}, each optional')
        if "reward" in body:
            session.add_reward(body["reward"], body.get("call"))
        if body.get("final") is True:
            session.finish_rewards()
        return _json({"object": "reward"})

    async def _call(self, request: Request, session: Session, dialect: Dialect) -> Response:
        call = dialect.parse(await _body(request), session.conversations.get)
        if dialect is MESSAGES and call.messages[-1]["role"] == "assistant":
            problem = "the last message must be the user's: the beginning of an answer (a prefill) cannot be continued"
            raise CallError(problem, param="messages")
        given, rewarded = request.headers.get(REWARD_HEADER), session.answered[-1:]
        reward = None if given is None else _reward_in_header(given)
        if reward is not None and not rewarded:
            raise CallError(NOTHING_TO_REWARD)
        leaving = asyncio.ensure_future(_until_disconnected(request))
        try:
            replies = await session.call(call, request.headers.get(PARENT_HEADER), leaving)
        finally:
            if reward is not None and not leaving.done():  # otherwise it may send the call and the header once more
                session.add_reward(reward, *rewarded)
            leaving.cancel()
        if dialect is RESPONSES:  # ``previous_response_id`` may continue these conversations
            stored = session.conversations
            stored.update((reply.call_id, carried_over(call, reply)) for reply in replies)
            while len(stored) > _MAX_STORED:
                del stored[next(iter(stored))]
        created, headers = int(time.time()), {CALL_HEADER: replies[0].call_id}
        if call.streams:
            from starlette.responses import Response  # noqa: PLC0415  # an extra

            text = "".join(dialect.stream(call, replies, created))
            return Response(text, 200, {**headers, "cache-control": "no-store"}, "text/event-stream")
        return _json(dialect.respond(call, replies, created), headers=headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response  # noqa: PLC0415  # an extra

    return Response(json.dumps(value, separators=(",", ":")), status, headers, "application/json")


async def _body(request: Request) -> dict[str, Any]:
    """Read the JSON object in the body of a request, within the limits of size and time."""
    from starlette.requests import ClientDisconnect  # noqa: PLC0415  # an extra

    raw = bytearray()
    try:
        async with asyncio.timeout(_SLOW_S):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > _MAX_BODY_BYTES:
                    raise CallError(f"the body must not be larger than {_MAX_BODY_BYTES} bytes", status=413)
    except ClientDisconnect:
        raise CallError(GONE, status=499) from None
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


def _reward_in_header(value: str) -> GivenReward:
    try:
        return received_reward(json.loads(value), f"the header {REWARD_HEADER}")
    except (ValueError, RecursionError) as error:
        raise CallError(f"the header {REWARD_HEADER} must be a number or a JSON object of numbers") from error


_current: tuple[asyncio.AbstractEventLoop, asyncio.Task[PolicyEndpoint]] | None = None


async def current_endpoint(port: int = 0) -> PolicyEndpoint:
    """Return the endpoint of this process.

    It is started at the first call, and again after it was stopped, or on the event loop of a forked process.

    Args:
        port: The port to listen on if it is started; 0 picks a free one.

    Raises:
        ConfigError: The port cannot be used.
    """
    global _current  # noqa: PLW0603  # one endpoint per process
    loop = asyncio.get_running_loop()
    starting = None if _current is None or _current[0] is not loop else _current[1]
    if starting is None or (starting.done() and (starting.exception() or not starting.result().is_listening)):
        starting = loop.create_task(PolicyEndpoint().start(port))
        _current = loop, starting
    return await asyncio.shield(starting)
