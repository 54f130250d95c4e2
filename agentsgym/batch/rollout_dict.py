"""Write a rollout in the form of trainers that take external rollouts."""

from __future__ import annotations

from typing import Any

from agentsgym.errors import ConfigError
from agentsgym.types import Trajectory


def rollout_dict(trajectory: Trajectory) -> dict[str, Any]:
    """Write a rollout as one entry of the result of TRL's ``GRPOTrainer(rollout_func=...)``.

    Returns:
        ``prompt_ids``, all before the first action; ``completion_ids``, from the first action's start to the last one's
        end, a₁ o₁ a₂ o₂ … a_N; ``logprobs``, one a token of it, or None if they are not known; ``env_mask``, 1 on the
        agent's tokens, which TRL reads, and the same as ``action_mask`` for other trainers; ``step_rewards``, one a
        turn, and ``final_reward``.

    Raises:
        ConfigError: It holds no tokens, no turn, or several segments, so that no one row is true.
    """
    if not trajectory.turns or not trajectory.token_ids or len(trajectory.segments) > 1:
        raise ConfigError(
            f"{trajectory!r} cannot be one row of tokens: it has no tokens, no turn, or a history that was rewritten"
        )
    span = slice(trajectory.turns[0].start, trajectory.turns[-1].stop)
    mask = trajectory.agent_token_mask[span]
    return {
        "prompt_ids": list(trajectory.token_ids[: span.start]),
        "completion_ids": list(trajectory.token_ids[span]),
        "logprobs": None if trajectory.logprobs is None else list(trajectory.logprobs[span]),
        "env_mask": mask,
        "action_mask": list(mask),
        "step_rewards": trajectory.turn_rewards,
        "final_reward": trajectory.final_reward,
    }
