"""Train a policy, by imitation of recorded trajectories and by policy gradients over many turns, both on TRL.

The only part of the library that imports ``trl``. :func:`rollout_func`, for trainers of others, is found here too.
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.interop.grpo import rollout_func as rollout_func

__getattr__, __all__ = lazy(__name__, {"agentsgym.interop.grpo": ["rollout_func"]})  # it loads torch
