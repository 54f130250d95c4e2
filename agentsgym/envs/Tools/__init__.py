"""Tools: an environment whose agent calls functions, methods of an object, or tools of an MCP server."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Tools.env import ToolEnv
    from agentsgym.envs.Tools.mcp_server import McpServer
    from agentsgym.envs.Tools.results import ToolResult
    from agentsgym.envs.Tools.sources import SessionTools, parallel, register_tools
    from agentsgym.envs.Tools.tasks import tasks_from

__all__ = ["McpServer", "SessionTools", "ToolEnv", "ToolResult", "parallel", "register_tools", "tasks_from"]

SPEC = EnvSpec(extra="mcp")
__getattr__ = lazy(__name__)
