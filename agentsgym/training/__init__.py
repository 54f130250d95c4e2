"""Train a policy, by imitation of recorded trajectories and by policy gradients over many turns, both on TRL.

The only part of the library that imports ``trl``. :func:`rollout_func`, for trainers of others, is found here too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentsgym.interop.grpo import rollout_func

__all__ = ["rollout_func"]


def __getattr__(name: str) -> Any:
    if name != "rollout_func":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("agentsgym.interop.grpo").rollout_func  # now, since it loads torch
