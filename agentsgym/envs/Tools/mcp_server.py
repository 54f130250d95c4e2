"""Say how an MCP server is reached; nothing is opened here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agentsgym.errors import ConfigError
from agentsgym.fields import is_positive_number, require
from agentsgym.texts import shown


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server whose tools an environment offers: a command (stdio), a URL (HTTP), or an object in this process.

    It is opened when a process first needs it and closed with the environment. Needs ``agentsgym[mcp]``.

    Attributes:
        command: Program and arguments of a server that speaks over stdin and stdout.
        url: Address of a server that speaks streamable HTTP.
        server: A server object of the MCP SDK, or a function that makes one (which a process pool can be sent).
        env: Environment variables for ``command``, beside the few that the SDK passes on.
        cwd: Where ``command`` runs; None for here.
        headers: Sent with every request to ``url``.
        per_session: Whether each session opens a server of its own, which keeps the state of servers that have one
            apart; else all sessions of a process share one.
        tools: The names of the tools to offer; None for all.
        start_timeout_s: How long it may take until it has named its tools.
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
        require("McpServer.start_timeout_s", self.start_timeout_s, is_positive_number, "a positive number")

    def __deepcopy__(self, memo: Any) -> Self:
        """A server object is shared: it cannot be copied, and each environment opens connections of its own."""
        return self

    @property
    def label(self) -> str:
        """What errors call it."""
        if self.url is not None:
            return f"the MCP server at {self.url}"
        return f"the MCP server {shown([*self.command] if self.command else self.server, 100)}"
