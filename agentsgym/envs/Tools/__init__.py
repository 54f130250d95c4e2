"""Tools: an environment whose agent calls functions, methods of an object, or tools of an MCP server."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.Tools.env import ToolEnv as ToolEnv
    from agentsgym.envs.Tools.results import ToolResult as ToolResult
    from agentsgym.envs.Tools.sources import McpServer as McpServer
    from agentsgym.envs.Tools.sources import SessionTools as SessionTools
    from agentsgym.envs.Tools.sources import parallel as parallel
    from agentsgym.envs.Tools.sources import register_tools as register_tools
    from agentsgym.envs.Tools.tasks import tasks_from as tasks_from

SPEC = EnvSpec(extra="mcp")
__getattr__, __all__ = lazy(
    __name__,
    {
        ".env": ["ToolEnv"],
        ".results": ["ToolResult"],
        ".sources": ["McpServer", "SessionTools", "parallel", "register_tools"],
        ".tasks": ["tasks_from"],
    },
)
