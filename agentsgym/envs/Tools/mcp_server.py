"""Describe how to reach an MCP server; no connection is opened here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agentsgym.errors import ConfigError
from agentsgym.fields import is_seconds, require
from agentsgym.texts import shown


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server whose tools an environment offers: a command (stdio), a URL (HTTP), or an in-process object.

    It is opened at first use in each process and closed with the environment. Requires ``agentsgym[mcp]``.

    Attributes:
        command: The program and arguments of a server that communicates over stdin and stdout.
        url: The address of a server with streamable HTTP.
        server: A server object of the MCP SDK, or a function that makes one (required for a process pool).
        env: Environment variables for ``command``, in addition to the few that the SDK passes.
        cwd: The working directory of ``command``; None for the current one.
        headers: HTTP headers for every request to ``url``.
        per_session: Whether each session opens a separate server, which isolates the state of stateful servers;
            otherwise, all sessions of a process share one server.
        tools: The names of the tools to offer; None for all.
        start_timeout_s: The time limit for starting the server and listing its tools.
    """

    command: Sequence[str] | None = None
    url: str | None = None
    server: Any = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    per_session: bool = False
    tools: Sequence[str] | None = None
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        given = [name for name in ("command", "url", "server") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"McpServer requires exactly one of command, url and server, got {', '.join(given) or 'none'}"
            )
        if self.command is not None and (isinstance(self.command, str) or not self.command):
            raise ConfigError(f"McpServer.command must be a list of program and arguments, got {shown(self.command)}")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"McpServer.url must begin with http:// or https://, got {shown(self.url)}")
        if isinstance(self.tools, str):
            raise ConfigError(f"McpServer.tools must be a list of names, got {shown(self.tools)}")
        require("McpServer.start_timeout_s", self.start_timeout_s, is_seconds, "a positive number")

    def __deepcopy__(self, memo: Any) -> Self:
        """Share the server object: it cannot be copied, and each environment opens separate connections."""
        return self

    @property
    def label(self) -> str:
        """The server's name in error messages."""
        if self.url is not None:
            return f"the MCP server at {self.url}"
        return f"the MCP server {shown([*self.command] if self.command else self.server, 100)}"
