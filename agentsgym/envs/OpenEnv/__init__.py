"""OpenEnv: environments that an OpenEnv server plays, over its WebSocket protocol."""

from agentsgym.envs.OpenEnv.env import OpenEnvEnv
from agentsgym.envs.OpenEnv.server import OpenEnvServer, register_server

__all__ = ["OpenEnvEnv", "OpenEnvServer", "register_server"]
