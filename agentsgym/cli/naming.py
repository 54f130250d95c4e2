"""Find the environment named on the command line."""

from __future__ import annotations

from typing import Any

from agentsgym.cli.console import usage_errors
from agentsgym.envs.datasets import naming
from agentsgym.envs.datasets.naming import NamedEnv


def find_env(name: str, env_config: dict[str, Any] | None = None) -> NamedEnv:
    """Find an environment with :func:`agentsgym.envs.datasets.naming.find_env`.

    Raises:
        UsageError: The name is unknown; the message suggests the nearest names.
    """
    with usage_errors():
        return naming.find_env(name, env_config)
