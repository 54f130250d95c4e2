"""Call MCP servers from synchronous code, on the event loop of programs, which an in-process server may block.

Versions 1.x and 2.x of the SDK are supported; only this module handles their different names of fields and functions.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Self, cast

from agentsgym.envs.Tools import SPEC
from agentsgym.envs.Tools.results import ToolResult, as_text, failed_result
from agentsgym.envs.Tools.sources import McpServer
from agentsgym.errors import EnvError
from agentsgym.event_loop import programs_loop
from agentsgym.texts import sentence_of, shown, visible

logger = logging.getLogger(__name__)

_CONNECTION_CLOSED = -32000  # JSON-RPC code that the SDK reports for a lost server
_METHOD_NOT_FOUND = -32601  # JSON-RPC: the server does not support pings
_CLOSING_S = 5.0  # time limit for a server to shut down
_MAX_PAGES = 1000  # of a server's list of tools
_PING_EVERY_S, _PING_LIMIT_S = 1.0, 2.0  # for a server over HTTP, when a session begins
_GRACE_S = 1.0  # extra wait for the loop to enforce a limit, which it cannot while an in-process server blocks it
_LAST_ANSWER_S = 0.2  # extra wait for an answer that arrived just before the connection was lost
_TAIL_LINES, _TAIL_LENGTH = 20, 500  # lines and characters of a failed program's stderr
_STDERR_WAIT_S = 0.5  # a program that exited has closed its stderr, but its children may keep it open


class Connection:
    """An open connection to a server; created by :class:`Connections`.

    Attributes:
        schemas: The JSON schemas of the server's tools.
        error: The reason why the connection is unusable; None while it is usable.
        serving: Done once the connection is closed.
    """

    def __init__(self, server: McpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._server, self._loop = server, loop
        self._stderr = None if server.command is None else _Stderr(server.label)
        self._session: Any = None
        self._pinged_s = time.monotonic()
        self._ready: Future[None] = Future()
        self._stop = asyncio.Event()
        self.serving = asyncio.run_coroutine_threadsafe(self._serve(), loop)

    def wait_until_ready(self) -> None:
        """Wait until the server has listed its tools."""
        limit_s = self._server.start_timeout_s
        try:
            self._ready.result(limit_s)
        except FutureTimeoutError:
            problem = f"{self._server.label} did not list its tools within {limit_s:g} s{self._printed_note()}"
            self.close()
            raise EnvError(problem) from None
        except Exception as error:
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
            problem = f"{self._server.label} cannot be used: {type(cause).__name__}: {sentence_of(cause, 300)}"
            raise EnvError(f"{problem}{self._printed_note()}") from error

    def call(self, name: str, arguments: Mapping[str, Any], limit_s: float | None) -> ToolResult:
        """Call a tool; an error reported by the tool or the server becomes a failed result.

        Raises:
            EnvError: The connection to the server is lost.
        """
        if self.error is not None:
            raise self._lost_error(self.error)
        future = asyncio.run_coroutine_threadsafe(self._call(name, dict(arguments), limit_s), self._loop)
        try:
            return future.result(None if limit_s is None else limit_s + _GRACE_S)
        except (FutureTimeoutError, TimeoutError):
            future.cancel()
            return failed_result(f"{name} took longer than {limit_s:g} s")
        except Exception as error:
            if self.error is None:
                raise
            raise self._lost_error(error) from error
        finally:
            future.cancel()  # has an effect only if the wait was interrupted

    def is_lost(self) -> bool:
        """Whether the connection is known to be lost: its command exited, or its URL failed a ping.

        A server that is slow to respond is not considered lost.
        """
        is_ping_due = self._server.url is not None and time.monotonic() - self._pinged_s > _PING_EVERY_S
        if is_ping_due and self.error is None and self._ready.done():
            self._pinged_s = time.monotonic()
            future = asyncio.run_coroutine_threadsafe(self._ping(), self._loop)
            with contextlib.suppress(FutureTimeoutError, TimeoutError):
                future.result(_PING_LIMIT_S + _GRACE_S)
        return self.error is not None

    def close(self) -> None:
        """Close the connection, and stop a server that was started for it, without waiting for its exit."""
        self.error = self.error or ConnectionError("the connection was closed")
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._request_end)

    def _request_end(self) -> None:
        self._stop.set()
        if not self._ready.done():
            self.serving.cancel()

    async def _serve(self) -> None:
        """Open the connection, and close it on request: both must happen in the same task."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._session = await self._open(stack)
                self.schemas = await self._list_tools()
                self._ready.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            self.error = self.error or error
            if not self._ready.done():
                self._ready.set_exception(error)
            if not isinstance(error, Exception):
                raise

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        """Open a session with the server and initialize it."""
        mcp, server, stderr = SPEC.load("mcp"), self._server, self._stderr
        if server.server is not None:
            made = server.server() if callable(server.server) else server.server
            if hasattr(mcp, "Client"):
                return await stack.enter_async_context(mcp.Client(made))
            from mcp.shared import memory  # noqa: PLC0415  # optional dependency

            untyped: Any = memory
            return await stack.enter_async_context(untyped.create_connected_server_and_client_session(made))
        if server.command is not None and stderr is not None:
            program, *arguments = server.command
            variables = dict(server.env) or None
            parameters = mcp.StdioServerParameters(command=program, args=arguments, env=variables, cwd=server.cwd)
            stack.enter_context(stderr.file)
            streams = await stack.enter_async_context(mcp.stdio_client(parameters, errlog=stderr.file))
            stderr.file.close()
        else:
            from mcp.client import streamable_http  # noqa: PLC0415  # optional dependency

            http: Any = streamable_http
            client = await stack.enter_async_context(http.create_mcp_http_client(headers=dict(server.headers)))
            streams = await stack.enter_async_context(http.streamable_http_client(server.url, http_client=client))
        session = mcp.ClientSession(_WatchedStream(streams[0], self._mark_lost), streams[1])
        await stack.enter_async_context(session)
        await session.initialize()
        return session

    async def _list_tools(self) -> list[dict[str, Any]]:
        """Request the schemas of the server's tools, page by page."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        list_page = self._session.list_tools
        for _ in range(_MAX_PAGES):
            if cursor is None:
                page = await list_page()
            elif "cursor" in inspect.signature(list_page).parameters:
                page = await list_page(cursor=cursor)
            else:
                page = await list_page(params=SPEC.load("mcp").types.PaginatedRequestParams(cursor=cursor))
            for tool in (tool.model_dump(by_alias=True) for tool in page.tools):
                about = {"description": tool.get("description") or "", "parameters": tool["inputSchema"]}
                found.append({"type": "function", "function": {"name": tool["name"], **about}})
            cursor = page.model_dump(by_alias=True).get("nextCursor")
            if not cursor:
                break
        names, wanted = [schema["function"]["name"] for schema in found], self._server.tools
        for name in wanted or ():
            if name not in names:
                raise EnvError(f"the server has no tool {shown(name)}; its tools are {', '.join(names)}")
        return [schema for schema in found if wanted is None or schema["function"]["name"] in wanted]

    def _mark_lost(self) -> None:
        """Record that the server exited or closed the connection."""
        self.error = self.error or ConnectionError("the server closed the connection")
        self._stop.set()

    async def _ping(self) -> None:
        try:
            await asyncio.wait_for(self._session.send_ping(), _PING_LIMIT_S)
        except TimeoutError:
            return
        except Exception as error:  # noqa: BLE001  # any error that the SDK raises for a lost server
            if getattr(getattr(error, "error", None), "code", None) != _METHOD_NOT_FOUND:
                self.error = self.error or error

    async def _call(self, name: str, arguments: dict[str, Any], limit_s: float | None) -> ToolResult:
        """Call a tool; the result contains the texts of the response in order, with placeholders for other content."""
        try:
            answer = await asyncio.wait_for(self._answer(name, arguments), limit_s)
        except TimeoutError:
            return failed_result(f"{name} took longer than {limit_s:g} s")
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            has_lost_stream = type(error).__module__.partition(".")[0] == "anyio"  # the stream is closed or broken
            if code == _CONNECTION_CLOSED or has_lost_stream or isinstance(error, OSError | EOFError):
                self.error = self.error or error
                raise
            return failed_result(sentence_of(error))  # the server is running, but rejected this call
        fields: dict[str, Any] = answer.model_dump(by_alias=True)
        parts = cast("list[dict[str, Any]]", fields.get("content") or [])
        content = "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)
        if not parts and fields.get("structuredContent") is not None:
            content = as_text(fields["structuredContent"])
        return failed_result(content) if fields.get("isError") else ToolResult(content=content)

    async def _answer(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool until the connection is lost: version 1 of the SDK may leave pending calls without an answer."""
        answer = asyncio.ensure_future(self._session.call_tool(name, arguments))
        lost = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait((answer,), timeout=_LAST_ANSWER_S)
            if not answer.done():
                raise self.error or ConnectionError("the connection was closed")
            return answer.result()
        finally:
            answer.cancel()
            lost.cancel()

    def _lost_error(self, error: BaseException) -> EnvError:
        cause = f"{type(error).__name__}: {sentence_of(error, 300)}".rstrip(": ")
        return EnvError(f"{self._server.label} is no longer connected: {cause}{self._printed_note()}")

    def _printed_note(self) -> str:
        text = self._stderr.tail() if self._stderr else ""
        return f"; it printed:\n{text}" if text else ""


class _Stderr:
    """The stderr of a server's program: lines are logged rather than printed, and errors include the last ones.

    Attributes:
        file: The write end of the pipe; closed in this process once the program has inherited it.
    """

    def __init__(self, label: str) -> None:
        read, write = os.pipe()
        self.file = os.fdopen(write, "w")
        self._label, self._lines = label, deque[str](maxlen=_TAIL_LINES)
        self._thread = threading.Thread(target=self._read, args=(read,), name="agentsgym-mcp-stderr", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """Return the last lines, after a short wait for the final output of a program that exited."""
        self._thread.join(_STDERR_WAIT_S)
        return visible("".join([*self._lines]))[-_TAIL_LENGTH:].strip()

    def _read(self, read: int) -> None:
        with open(read, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.append(line)
                logger.debug("%s printed: %s", self._label, visible(line.rstrip()))


class Connections:
    """An environment's connections in this process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._shared: dict[int, Connection] = {}
        self._opened: set[Connection] = set()

    def shared(self, server: McpServer) -> Connection:
        """Return the connection that all sessions share, opened at first use and reopened after a loss.

        Raises:
            EnvError: The server cannot be started.
        """
        with self._lock:
            known = self._shared.get(id(server))
            if known is None or known.is_lost():
                if known is not None:
                    known.close()
                known = self._shared[id(server)] = self._connect(server)
        known.wait_until_ready()
        return known

    def open(self, server: McpServer) -> Connection:
        """Open a connection for one session.

        Raises:
            EnvError: The server cannot be started.
        """
        with self._lock:
            connection = self._connect(server)
        connection.wait_until_ready()
        return connection

    def close(self) -> None:
        """Close all connections; do nothing in a forked process, which has no running loop."""
        if self._pid != os.getpid():
            return
        with self._lock:
            opened, self._opened = self._opened, set()
            self._shared = {}
        for connection in opened:
            connection.close()
        for serving in wait([connection.serving for connection in opened], _CLOSING_S).not_done:
            serving.cancel()
        atexit.unregister(self.close)

    def _connect(self, server: McpServer) -> Connection:
        SPEC.load("mcp")
        connection = Connection(server, programs_loop())
        if not self._opened:
            atexit.register(self.close)  # after the loop was started, so that it is stopped later
        self._opened.add(connection)
        connection.serving.add_done_callback(lambda _: self._opened.discard(connection))
        return connection


class _WatchedStream:
    """A server's message stream that reports its end; the SDK reports it only to pending calls."""

    def __init__(self, stream: Any, ended: Callable[[], None]) -> None:
        self._stream, self._ended = stream, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> Any:
        return await self._stream.__aexit__(*raised)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:  # the stream ended, broke, or was closed
            self._ended()
            raise
