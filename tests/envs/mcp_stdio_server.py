"""A real MCP server over stdin and stdout, or over HTTP at the port that is given, with all that can go wrong."""

from __future__ import annotations

import os
import sys
import time

try:
    from mcp.server import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

is_http = len(sys.argv) > 1
server = MCPServer("shop", log_level="INFO" if is_http else "ERROR")  # mcp 1 logs every request to stderr
count = 0


@server.tool()
def price(good: str) -> int:
    """Look up a price."""
    return {"pear": 3, "egg": 4}[good]


@server.tool()
def tick() -> str:
    """Count the calls of this process."""
    global count  # noqa: PLW0603
    count += 1
    return f"{count} in {os.getpid()}"


@server.tool()
def sleep(seconds: float) -> str:
    """Take a while."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def babble() -> str:
    """Print what is no message, and then answer."""
    sys.stdout.write("this is not JSON\n{]\n")
    sys.stdout.flush()
    return "output"


@server.tool()
def complain(lines: int) -> str:
    """Print lines to stderr."""
    for number in range(lines):
        sys.stderr.write(f"complaint {number}\n")
    sys.stderr.flush()
    return "complained"


if __name__ == "__main__":
    if not is_http:
        server.run("stdio")
    elif hasattr(server.settings, "port"):  # mcp 1
        server.settings.port = int(sys.argv[1])
        server.run("streamable-http")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
