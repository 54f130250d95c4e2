"""OpenEnv: environments that run on an OpenEnv server, reached over its WebSocket protocol."""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy
from agentsgym.envs.spec import EnvSpec

if TYPE_CHECKING:
    from agentsgym.envs.OpenEnv.env import OpenEnvEnv as OpenEnvEnv
    from agentsgym.envs.OpenEnv.server import OpenEnvServer as OpenEnvServer
    from agentsgym.envs.OpenEnv.server import register_server as register_server

SPEC = EnvSpec(packages=("websockets",), extra="openenv", offline=False)
__getattr__, __all__ = lazy(__name__, {".env": ["OpenEnvEnv"], ".server": ["OpenEnvServer", "register_server"]})
