"""OpenEnv: environments that run on an OpenEnv server, reached over its WebSocket protocol."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.OpenEnv.env import OpenEnvEnv
    from agentsgym.envs.OpenEnv.server import OpenEnvServer, register_server

__all__ = ["OpenEnvEnv", "OpenEnvServer", "register_server"]

SPEC = EnvSpec(packages=("websockets",), extra="openenv", offline=False)
__getattr__ = lazy(__name__)
