"""Convert trajectories to what others read: padded or single rows, the format of TRL's ``rollout_func``, turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agentsgym.credit.rewards import credited_rewards
from agentsgym.errors import ConfigError
from agentsgym.types import Trajectory

T = TypeVar("T")


def pad_right(row: Sequence[T], length: int, value: T) -> list[T]:
    """Pad a row on the right up to ``length``.

    >>> pad_right([1, 2], 4, 0)
    [1, 2, 0, 0]
    """
    return [*row, *[value] * (length - len(row))]


def round_up(number: int, multiple_of: int) -> int:
    """Round a number up to a multiple.

    >>> round_up(9, 8), round_up(8, 8)
    (16, 8)
    """
    return -(-number // multiple_of) * multiple_of


def loss_mask(trajectory: Trajectory) -> list[int]:
    """Return 1 for each token that may be trained on, (T,): the agent's tokens; all 0 for a failed rollout."""
    if trajectory.failed:
        return [0] * len(trajectory.token_ids)
    return trajectory.agent_token_mask


def pad_task_groups(trajectories: Sequence[Trajectory], *, pad_token_id: int) -> dict[str, list[Any]]:
    """Pad the rows of each task group to the group's longest row; the keys are those of ``run_trial``.

    Args:
        trajectories: In task-major order.
        pad_token_id: Padding for the ids; masks, rewards and log-probabilities are padded with 0.
    """
    longest: dict[int, int] = {}
    for trajectory in trajectories:
        longest[trajectory.task_index] = max(longest.get(trajectory.task_index, 0), len(trajectory.token_ids))
    widths = [longest[trajectory.task_index] for trajectory in trajectories]
    rows = list(zip(trajectories, widths, strict=True))
    return {
        "padded_full_token_ids": [pad_right(row.token_ids, width, pad_token_id) for row, width in rows],
        "padded_full_attention_mask": [pad_right([1] * len(row.token_ids), width, 0) for row, width in rows],
        "padded_agent_token_mask": [pad_right(loss_mask(row), width, 0) for row, width in rows],
        "padded_per_token_rewards": [pad_right(row.per_token_rewards, width, 0.0) for row, width in rows],
        "padded_logprobs": [
            None if row.logprobs is None else pad_right(row.logprobs, width, 0.0) for row, width in rows
        ],
        "final_rewards": [row.final_reward for row in trajectories],
        "session_ids": [row.session_id for row in trajectories],
        "final_completion_messages": [list(row.messages) for row in trajectories],
        "stop_reasons": [row.stop_reason for row in trajectories],
    }


def unpadded_row(trajectory: Trajectory) -> dict[str, Any]:
    """Convert one trajectory to an unpadded row; the keys are those of ``_run_complete_episode``."""
    return {
        "full_token_ids": list(trajectory.token_ids),
        "full_attention_mask": [1] * len(trajectory.token_ids),
        "agent_token_mask": loss_mask(trajectory),
        "per_token_rewards": list(trajectory.per_token_rewards),
        "final_reward": trajectory.final_reward,
        "final_completion_messages": list(trajectory.messages),
        "session_id": trajectory.session_id,
    }


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


TRANSITION_KEYS = ("ids", "prompt_ids", "messages", "mask", "logprobs", "rewards", "per_token_rewards", "session_ids")


def transitions(
    trajectories: Sequence[Trajectory], *, turn_credit: str = "step", return_all_steps: bool = True
) -> dict[str, list[list[Any]]]:
    """Nest sampled responses and their prompts by rollout p and turn k.

    Args:
        trajectories: The rollouts.
        turn_credit: Which turns are rewarded, for ``rewards``.
        return_all_steps: Whether to keep all turns; False keeps only each rollout's last turn, as a list of one.

    Returns:
        ``ids[p][k]`` (the ids of the response), ``prompt_ids[p][k]`` (the exact prompt it was sampled from),
        ``messages[p][k]`` (the messages of this prompt, and the response), ``mask[p][k]`` (1 for each of ``ids``; 0 in
        a failed rollout), ``logprobs[p][k]`` (one per id, from sampling; None if unknown for the rollout),
        ``rewards[p][k]`` (the reward of the turn), ``per_token_rewards[p][k]`` (one per id) and ``session_ids[p][k]``.
    """
    nested: dict[str, list[list[Any]]] = {key: [] for key in TRANSITION_KEYS}
    for trajectory in trajectories:
        turns: list[dict[str, Any]] = []
        for turn, reward in zip(trajectory.turns, credited_rewards(trajectory, turn_credit), strict=True):
            span, logprobs, messages = slice(turn.start, turn.stop), trajectory.logprobs, trajectory.messages
            prompt = messages[: turn.message_index] if turn.prompt_messages is None else turn.prompt_messages
            turns.append(
                {
                    "ids": list(trajectory.token_ids[span]),
                    "prompt_ids": list(trajectory.token_ids[turn.prompt_start : turn.start]),
                    "messages": [*prompt, *messages[turn.message_index : turn.message_index + 1]],
                    "mask": [0 if trajectory.failed else 1] * (turn.stop - turn.start),
                    "logprobs": None if logprobs is None else list(logprobs[span]),
                    "rewards": 0.0 if trajectory.failed else reward,
                    "per_token_rewards": list(trajectory.per_token_rewards[span]),
                    "session_ids": trajectory.session_id,
                }
            )
        for key in TRANSITION_KEYS:
            rows = [turn[key] for turn in turns]
            nested[key].append(rows if return_all_steps else rows[-1:])
    return nested


def flatten(nested: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[Any]]:
    """Concatenate the rollouts of each key, and add ``episode_idx_map``, the index of each entry's rollout.

    >>> flatten({"rewards": [[0.0, 1.0], [], [0.5]]})
    {'rewards': [0.0, 1.0, 0.5], 'episode_idx_map': [0, 0, 2]}
    """
    flat = {key: [item for rollout in rollouts for item in rollout] for key, rollouts in nested.items()}
    rollouts = next(iter(nested.values()), ())
    flat["episode_idx_map"] = [index for index, rollout in enumerate(rollouts) for _ in rollout]
    return flat
