"""Convert a rollout to the format of trainers that accept external rollouts."""

from __future__ import annotations

from typing import Any

from agentsgym.batch.padding import loss_mask
from agentsgym.errors import ConfigError
from agentsgym.types import Trajectory


def rollout_dict(trajectory: Trajectory) -> dict[str, Any]:
    """Convert a rollout to one entry of the result of TRL's ``GRPOTrainer(rollout_func=...)``.

    Returns:
        ``prompt_ids``, all tokens before the first action; ``completion_ids``, from the first action's start to the
        last action's end, a₁ o₁ a₂ o₂ … a_N; ``logprobs``, one per completion token, or None if unknown; ``env_mask``,
        which TRL reads: 1 for agent tokens and 0 for others, and 0 for all tokens of a failed rollout;
        ``action_mask``, a copy of it for other trainers; ``step_rewards``, one per turn; ``final_reward``;
        ``stop_reason``, such as ``"failed"``; and of named rewards ``step_components``, one dict or None per turn, and
        ``final_components``, both None without any.
    """
    num_segments = len(trajectory.segments)
    if not trajectory.turns or not trajectory.token_ids or num_segments > 1:
        rewritten = f"its history was rewritten into {num_segments} segments (use history='append')"
        no_tokens = "it has no tokens (give the environment a tokenizer)"
        reason = "it has no turns" if not trajectory.turns else rewritten if trajectory.token_ids else no_tokens
        raise ConfigError(f"{trajectory!r} cannot be converted to one row: {reason}")
    span = slice(trajectory.turns[0].start, trajectory.turns[-1].stop)
    mask = loss_mask(trajectory)[span]
    steps = [turn.components and dict(turn.components) for turn in trajectory.turns]
    return {
        "prompt_ids": list(trajectory.token_ids[: span.start]),
        "completion_ids": list(trajectory.token_ids[span]),
        "logprobs": None if trajectory.logprobs is None else list(trajectory.logprobs[span]),
        "env_mask": mask,
        "action_mask": list(mask),
        "step_rewards": trajectory.turn_rewards,
        "final_reward": trajectory.final_reward,
        "stop_reason": trajectory.stop_reason.value,
        "step_components": steps if any(steps) else None,
        "final_components": trajectory.final_components and dict(trajectory.final_components),
    }
