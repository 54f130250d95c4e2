"""Nest rollouts turn by turn, as ``generate`` returns them, and flatten that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentsgym.credit.rewards import credited_rewards
from agentsgym.types import Message, Trajectory, Turn

TRANSITION_KEYS = (
    "ids",
    "prompt_ids",
    "messages",
    "mask",
    "logprobs",
    "rewards",
    "per_token_rewards",
    "session_ids",
)


def transitions(
    trajectories: Sequence[Trajectory], *, turn_credit: str = "step", return_all_steps: bool = True
) -> dict[str, list[list[Any]]]:
    """Nest what was sampled, from which prompt, by rollout p and turn k.

    Args:
        trajectories: The rollouts.
        turn_credit: Which turn is rewarded; ``rewards`` are those amounts.
        return_all_steps: False keeps only each rollout's last turn, in single-element lists.

    Returns:
        ``ids[p][k]`` (the response's), ``prompt_ids[p][k]`` (the exact prompt it was sampled from),
        ``messages[p][k]`` (the conversation that this prompt shows, and the response), ``mask[p][k]`` (ones over
        ``ids``; zeros for a failed rollout), ``logprobs[p][k]`` (one an id, as it was sampled; None where the rollout's
        are not known), ``rewards[p][k]`` (the turn's), ``per_token_rewards[p][k]`` (one an id) and
        ``session_ids[p][k]``.
    """
    nested: dict[str, list[list[Any]]] = {key: [] for key in TRANSITION_KEYS}
    for trajectory in trajectories:
        turns = _turns(trajectory, turn_credit)
        for key in TRANSITION_KEYS:
            rows = [turn[key] for turn in turns]
            nested[key].append(rows if return_all_steps else rows[-1:])
    return nested


def _turns(trajectory: Trajectory, turn_credit: str) -> list[dict[str, Any]]:
    rewards = credited_rewards(trajectory, turn_credit)
    return [
        {
            "ids": list(trajectory.token_ids[turn.start : turn.stop]),
            "prompt_ids": list(trajectory.token_ids[turn.prompt_start : turn.start]),
            "messages": _messages(trajectory, turn),
            "mask": [0 if trajectory.failed else 1] * (turn.stop - turn.start),
            "logprobs": _of_turn(trajectory.logprobs, turn),
            "rewards": 0.0 if trajectory.failed else reward,
            "per_token_rewards": list(trajectory.per_token_rewards[turn.start : turn.stop]),
            "session_ids": trajectory.session_id,
        }
        for turn, reward in zip(trajectory.turns, rewards, strict=True)
    ]


def _of_turn(values: Sequence[float] | None, turn: Turn) -> list[float] | None:
    return None if values is None else list(values[turn.start : turn.stop])


def _messages(trajectory: Trajectory, turn: Turn) -> list[Message]:
    if turn.prompt_messages is None:
        return list(trajectory.messages[: turn.message_index + 1])
    return [*turn.prompt_messages, trajectory.messages[turn.message_index]]


def flatten(nested: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[Any]]:
    """One flat list a key, rollout after rollout, and ``episode_idx_map``: the rollout that each entry is of.

    >>> flatten({"rewards": [[0.0, 1.0], [], [0.5]]})
    {'rewards': [0.0, 1.0, 0.5], 'episode_idx_map': [0, 0, 2]}
    """
    flat = {key: [item for rollout in rollouts for item in rollout] for key, rollouts in nested.items()}
    rollouts = next(iter(nested.values()), ())
    flat["episode_idx_map"] = [index for index, rollout in enumerate(rollouts) for _ in rollout]
    return flat
