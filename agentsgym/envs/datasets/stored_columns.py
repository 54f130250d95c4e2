"""Describe a rollout's environment in columns of a rollout store."""

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
        trajectory: The rollout. If it failed, its tools are not stored, since they may be the cause.
    """
    tools: Any = None
    if not trajectory.failed:
        try:
            tools = env.tool_schemas or None
        except Exception:  # user code or an unreachable server; the rollout is still stored
            logger.exception("rollouts of %s are stored without tool schemas", type(env).__name__)
    return {"env_class_path": class_path(type(env)), "env_config": env.env_config, "tools": tools}
