"""An environment's resources in one process: threads, open servers, and each session's tools."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from agentsgym.envs.shared.timed import CallTimeoutError, Runner
from agentsgym.envs.Tools.mcp_client import Connection, Connections
from agentsgym.envs.Tools.mcp_server import McpServer
from agentsgym.envs.Tools.sources import Names, SessionTools, Source, Tool, function_tools, is_named
from agentsgym.errors import ConfigError, EnvError
from agentsgym.texts import sentence_of

_Made = TypeVar("_Made")


class _Session:
    """The tools of one session and the functions that close them."""

    __slots__ = ("closers", "tools")

    def __init__(self, tools: dict[str, Tool]) -> None:
        self.tools = tools
        self.closers: list[Callable[[], None]] = []


class Process:
    """The resources of one process, made at first use and never sent to another one.

    Attributes:
        pid: The id of the process.
        runner: The threads for calls.
        tools: The environment's tools, as returned by :class:`~agentsgym.envs.Tools.env.ToolEnv`.
    """

    def __init__(
        self, tools: Sequence[Source | Mapping[str, Any]], limit_s: float | None = None, parallel_names: Names = ()
    ) -> None:
        """Take the environment's tools and limits.

        Args:
            tools: The sources of tools; the calls of a bare schema are not made here.
            limit_s: The time limit of making, and of closing, a session's object.
            parallel_names: The tools whose calls run concurrently in addition to those marked parallel, or ``"all"``.
        """
        self.pid = os.getpid()
        self.runner = Runner("calls of tools", "env_config['tool_timeout_s']")
        self.tools = tools
        self._sources = [one for one in tools if isinstance(one, SessionTools | McpServer)]
        self._functions: dict[str, Tool] | None = None  # set at the first session, after validation
        self._limit_s, self._parallel_names = limit_s, parallel_names
        self._connections = Connections()
        self._sessions: dict[str, _Session] = {}

    def schemas_of(self, server: McpServer) -> list[dict[str, Any]]:
        """Fetch the schemas of a server's tools.

        Raises:
            ConfigError: The server cannot be started.
        """
        try:
            return self._connections.shared(server).schemas
        except EnvError as error:
            raise ConfigError(sentence_of(error)) from error

    def begin(self, session_id: str, task_data: dict[str, Any], generator: random.Random) -> None:
        """Make a session's tools: its objects, and its private or the shared servers.

        Raises:
            EnvError: A server cannot be started, or an object is not made within the time limit.
        """
        self.end(session_id)
        if self._functions is None:
            self._functions = function_tools([one for one in self.tools if callable(one)], self._parallel_names)
        functions = self._functions
        session = self._sessions[session_id] = _Session({**functions} if self._sources else functions)
        try:
            for source in self._sources:
                if isinstance(source, SessionTools):
                    self._make(source, session, task_data, generator)
                else:
                    self._connect(source, session)
        except BaseException:
            self.end(session_id)
            raise

    def tool(self, session_id: str, name: str) -> Tool:
        """Return a session's tool.

        Raises:
            EnvError: Nothing makes the calls of this tool.
        """
        tool = self.tool_or_none(session_id, name)
        if tool is None:
            raise EnvError(f"the tool {name!r} has no implementation in this session: call super()._initialize_episode")
        return tool

    def tool_or_none(self, session_id: str, name: str) -> Tool | None:
        """Return a session's tool; None if a subclass makes its calls itself."""
        session = self._sessions.get(session_id)
        return None if session is None else session.tools.get(name)

    def is_parallel(self, session_id: str, name: str) -> bool:
        """Whether a tool's calls may run concurrently: by the tool's mark, or by name if a subclass makes them."""
        tool = self.tool_or_none(session_id, name)
        return is_named(name, self._parallel_names) if tool is None else tool.is_parallel

    def end(self, session_id: str) -> None:
        """Close a session's resources; all are closed even if one raises."""
        session = self._sessions.pop(session_id, None)
        errors: list[Exception] = []
        for closer in session.closers if session else ():
            try:
                self._within(closer, "close() of a session's tools")
            except Exception as error:  # noqa: BLE001  # foreign code; raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End servers and threads; does nothing in a forked process, which has neither."""
        if self.pid != os.getpid():
            return
        self._sessions.clear()
        self._connections.close()
        self.runner.close()

    def _make(
        self, source: SessionTools, session: _Session, task_data: dict[str, Any], generator: random.Random
    ) -> None:
        given_up = threading.Event()

        def make() -> tuple[dict[str, Tool], Callable[[], None]]:
            made = source.begin(task_data, generator, self._parallel_names)
            if given_up.is_set():
                made[1]()
            return made

        try:
            tools, closer = self._within(make, f"making {source.tools_class.__name__}")
        except EnvError:
            given_up.set()
            raise
        session.tools.update(tools)
        session.closers.append(closer)

    def _within(self, work: Callable[[], _Made], name: str) -> _Made:
        """Run setup or teardown of a session's object, in another thread if there is a time limit."""
        if self._limit_s is None:
            return work()
        try:
            return self.runner.finish(self.runner.start(work), self._limit_s)
        except CallTimeoutError:
            problem = f"{name} took longer than env_config['setup_timeout_s'] = {self._limit_s:g} and was abandoned"
            raise EnvError(problem) from None

    def _connect(self, server: McpServer, session: _Session) -> None:
        if server.per_session:
            connection = self._connections.open(server)
            session.closers.append(partial(self._connections.release, connection))
        else:
            connection = self._connections.shared(server)
        for schema in connection.schemas:
            name = schema["function"]["name"]
            session.tools[name] = Tool(
                _caller(connection, name), is_parallel=is_named(name, self._parallel_names), keeps_time=True
            )


def _caller(connection: Connection, name: str) -> Callable[..., Any]:
    return partial(connection.call, name)
