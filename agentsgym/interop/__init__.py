"""Use environments with TRL's ``GRPOTrainer``, trainers that are built on it, and verifiers.

Nothing here imports ``trl`` or :mod:`agentsgym.training`, so more versions of TRL are supported than by this library's
trainer: 1.9 to 1.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.interop.factory import as_environment_factory
    from agentsgym.interop.grpo import RolloutFunc, environment_reward, rollout_func
    from agentsgym.interop.prompts import as_prompt, prompt_dataset
    from agentsgym.interop.verifiers import as_verifiers

__all__ = [
    "RolloutFunc",
    "as_environment_factory",
    "as_prompt",
    "as_verifiers",
    "environment_reward",
    "prompt_dataset",
    "rollout_func",
]

__getattr__ = lazy(__name__)
