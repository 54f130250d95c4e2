"""Use environments with TRL's ``GRPOTrainer``, trainers that are built on it, and verifiers.

Nothing here imports ``trl`` or :mod:`agentsgym.training`, so more versions of TRL are supported than by this library's
trainer: 1.9 to 1.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.interop.factory import as_environment_factory as as_environment_factory
    from agentsgym.interop.grpo import RolloutFunc as RolloutFunc
    from agentsgym.interop.grpo import environment_reward as environment_reward
    from agentsgym.interop.grpo import rollout_func as rollout_func
    from agentsgym.interop.prompts import as_prompt as as_prompt
    from agentsgym.interop.prompts import prompt_dataset as prompt_dataset
    from agentsgym.interop.verifiers import as_verifiers as as_verifiers

__getattr__, __all__ = lazy(
    __name__,
    {
        ".factory": ["as_environment_factory"],
        ".grpo": ["RolloutFunc", "environment_reward", "rollout_func"],
        ".prompts": ["as_prompt", "prompt_dataset"],
        ".verifiers": ["as_verifiers"],
    },
)
