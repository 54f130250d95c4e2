"""Tools: an environment whose agent calls functions, the methods of an object, or an MCP server."""

from agentsgym.envs.Tools.env import ToolEnv
from agentsgym.envs.Tools.mcp_server import McpServer
from agentsgym.envs.Tools.results import ToolResult
from agentsgym.envs.Tools.sources import SessionTools, parallel, register_tools
from agentsgym.envs.Tools.tasks import tasks_from

__all__ = ["McpServer", "SessionTools", "ToolEnv", "ToolResult", "parallel", "register_tools", "tasks_from"]
