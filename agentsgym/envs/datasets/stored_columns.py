"""Columns of a rollout store that describe the environment."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from agentsgym.envs.dataset_rows import class_path

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.types import Trajectory

logger = logging.getLogger(__name__)


def stored_columns(env: MultistepEnv, trajectory: Trajectory) -> dict[str, Any]:
    """Return the columns that identify a rollout's environment: its class, its configuration and its tools.

    Args:
        env: The environment.
        trajectory: The rollout. Tools are not read for a failed one, since they may be why it failed.
    """
    tools: Any = None
    if not trajectory.failed:
        try:
            tools = env.tool_schemas or None
        except Exception:  # a user's environment, or a server that another process reached; the rollout is still stored
            logger.exception("rollouts of %s are stored without the schemas of its tools", type(env).__name__)
    return {"env_class_path": class_path(type(env)), "env_config": env.env_config, "tools": tools}
