"""An environment's resources in one process: threads, open servers, and each session's tools."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from agentsgym.envs.shared.timed import CallTimeoutError, Runner
from agentsgym.envs.Tools.mcp_client import Connections
from agentsgym.envs.Tools.sources import McpServer, Names, SessionTools, Source, Tool, is_named, is_parallel, make_tool
from agentsgym.errors import ConfigError, EnvError
from agentsgym.failures import failure_of
from agentsgym.texts import sentence_of

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")
_Closer = Callable[[], None]


class Process:
    """The resources of one process, created at first use and never sent to another process.

    Attributes:
        pid: The id of the process.
        runner: The threads for calls.
        tools: The environment's tools, as returned by :class:`~agentsgym.envs.Tools.env.ToolEnv`.
    """

    def __init__(
        self, tools: Sequence[Source | Mapping[str, Any]], limit_s: float | None = None, parallel_names: Names = ()
    ) -> None:
        """Store the environment's tools and limits.

        Args:
            tools: The sources of tools; bare schemas have no implementation here.
            limit_s: The time limit for creating, and for closing, a session's object, in seconds.
            parallel_names: The tools, besides those marked as parallel, whose calls run concurrently, or ``"all"``.
        """
        self.pid = os.getpid()
        self.runner = Runner("tool calls", "env_config['tool_timeout_s']")
        self.tools = tools
        self._sources = [one for one in tools if isinstance(one, SessionTools | McpServer)]
        self._functions: dict[str, Tool] | None = None  # set at the first session, after validation
        self._limit_s, self._parallel_names = limit_s, parallel_names
        self._connections = Connections()
        self._reported: set[tuple[str, str]] = set()  # tools, each with the name of an exception's type
        self._sessions: dict[str, tuple[dict[str, Tool], list[_Closer]]] = {}  # tools, and functions that close them

    def schemas_of(self, server: McpServer) -> list[dict[str, Any]]:
        """Fetch the schemas of a server's tools."""
        try:
            return self._connections.shared(server).schemas
        except EnvError as error:
            raise ConfigError(sentence_of(error)) from error

    def begin(self, session_id: str, task_data: dict[str, Any], generator: random.Random) -> None:
        """Create a session's tools: its objects, and connections to private or shared servers.

        Raises:
            EnvError: A server cannot be started, or an object is not created within the time limit.
        """
        self.end(session_id)
        if self._functions is None:
            functions: list[Any] = [one for one in self.tools if callable(one)]
            names = self._parallel_names
            self._functions = {one.__name__: make_tool(one, is_parallel=is_parallel(one, names)) for one in functions}
        tools, closers = self._sessions[session_id] = {**self._functions} if self._sources else self._functions, []
        try:
            for source in self._sources:
                if isinstance(source, SessionTools):
                    made, closer = self._make(source, task_data, generator)
                    tools.update(made)
                    closers.append(closer)
                    continue
                if source.per_session:
                    connection = self._connections.open(source)
                    closers.append(connection.close)
                else:
                    connection = self._connections.shared(source)
                for name in (schema["function"]["name"] for schema in connection.schemas):
                    may_overlap = is_named(name, self._parallel_names)
                    tools[name] = Tool(partial(connection.call, name), may_overlap, keeps_time=True)
        except BaseException:
            self.end(session_id)
            raise

    def tool(self, session_id: str, name: str) -> Tool:
        """Return a session's tool."""
        tool = self.tool_or_none(session_id, name)
        if tool is None:
            raise EnvError(f"the tool {name!r} has no implementation in this session: call super()._initialize_episode")
        return tool

    def tool_or_none(self, session_id: str, name: str) -> Tool | None:
        """Return a session's tool; None if a subclass implements it in ``_call_tool``."""
        session = self._sessions.get(session_id)
        return None if session is None else session[0].get(name)

    def is_parallel(self, session_id: str, name: str) -> bool:
        """Whether a tool's calls may run concurrently: it is marked as parallel, or named in the configuration."""
        tool = self.tool_or_none(session_id, name)
        return is_named(name, self._parallel_names) if tool is None else tool.is_parallel

    def report(self, name: str, error: BaseException) -> None:
        """Log the first exception of each type that a tool raised, since only the agent reads the others."""
        key = name, type(error).__name__
        if key not in self._reported:
            self._reported.add(key)
            failure = failure_of(EnvError, f"the tool {name!r}", error)
            text = "%s (the agent reads this as the result; only the first %s of a tool is logged)\n%s"
            logger.warning(text, sentence_of(failure), key[1], failure.trace)

    def end(self, session_id: str) -> None:
        """Close a session's resources; all are closed even if one raises."""
        _, closers = self._sessions.pop(session_id, ({}, []))
        errors: list[Exception] = []
        for closer in closers:
            try:
                self._within(closer, "close() of a session's tools")
            except Exception as error:  # noqa: BLE001  # user code; raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Stop servers and threads; do nothing in a forked process, which has neither."""
        if self.pid != os.getpid():
            return
        self._sessions.clear()
        self._connections.close()
        self.runner.close()

    def _make(
        self, source: SessionTools, task_data: dict[str, Any], generator: random.Random
    ) -> tuple[dict[str, Tool], _Closer]:
        """Create a session's object; one that is finished only after the time limit is closed immediately."""
        given_up = threading.Event()

        def make() -> tuple[dict[str, Tool], _Closer]:
            made = source.begin(task_data, generator, self._parallel_names)
            if given_up.is_set():
                made[1]()
            return made

        try:
            return self._within(make, f"creating {source.tools_class.__name__}")
        except EnvError:
            given_up.set()
            raise

    def _within(self, work: Callable[[], _Made], name: str) -> _Made:
        """Run the setup or teardown of a session's object, in another thread if there is a time limit."""
        if self._limit_s is None:
            return work()
        try:
            return self.runner.finish(self.runner.start(work), self._limit_s)
        except CallTimeoutError:
            problem = f"{name} took longer than env_config['setup_timeout_s'] = {self._limit_s:g} and was abandoned"
            raise EnvError(problem) from None
