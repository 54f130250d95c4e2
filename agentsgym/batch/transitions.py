"""Nest rollouts by turn, as ``generate`` returns them, and flatten the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentsgym.credit.rewards import credited_rewards
from agentsgym.types import Trajectory

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
