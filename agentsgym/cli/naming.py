"""Find the environment that a name on the command line means; a name that means none is a fault of the command line."""

from __future__ import annotations

from typing import Any

from agentsgym.cli.console import usage
from agentsgym.envs.datasets import naming
from agentsgym.envs.datasets.naming import NamedEnv, completions, did_you_mean, known_names, nearest

__all__ = ["NamedEnv", "completions", "did_you_mean", "find_env", "known_names", "nearest"]


def find_env(name: str, env_config: dict[str, Any] | None = None) -> NamedEnv:
    """Find what a name means, as :func:`agentsgym.envs.datasets.naming.find_env` does.

    Raises:
        UsageError: Nothing has that name; the nearest names are given.
    """
    with usage():
        return naming.find_env(name, env_config)
