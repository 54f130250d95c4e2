"""Train a policy, by imitation of recorded trajectories and by policy gradients over many turns, both on TRL.

The only part of the library that imports ``trl``. :func:`rollout_func`, for trainers of others, is found here too.
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.interop.grpo import rollout_func as rollout_func
    from agentsgym.training.selection.imitate import tiny_imitation_config as tiny_imitation_config

__getattr__, __all__ = lazy(  # it loads torch
    __name__, {"agentsgym.interop.grpo": ["rollout_func"], ".selection.imitate": ["tiny_imitation_config"]}
)
