"""Validation of a recording's metadata and rewards, and the construction of its trajectory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypedDict, cast

from agentsgym.credit.rewards import per_token_rewards
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_dict, is_int, is_number, is_str, one_of, require
from agentsgym.texts import shown
from agentsgym.types import Message, StopReason, Trajectory, Turn

Rewards = float | Sequence[float]
"""A single number, which becomes the reward of the last turn, or one number per turn, (K,)."""


class RecordingMetadata(TypedDict, total=False):
    """The metadata of a recorded rollout; defaults are as in :class:`~agentsgym.types.Trajectory`.

    Attributes:
        stop_reason: The reason why the rollout ended: a :class:`~agentsgym.types.StopReason` or its value; ``"done"``
            by default.
        session_id: The name of the session.
        task_index: The index of the task; rollouts with the same index are compared with each other.
        rollout_index: The index of the rollout among those of its task.
        task_data: The task's data.
        info: The environment's final info; ``info["success"]`` is whether the task was solved.
    """

    stop_reason: StopReason | str
    session_id: str
    task_index: int
    rollout_index: int
    task_data: Mapping[str, Any]
    info: Mapping[str, Any]


_REASONS: Final = [reason for reason in StopReason if reason is not StopReason.FAILED]
_VALID: Final[Mapping[str, tuple[Check, str]]] = {
    "stop_reason": (one_of(*_REASONS), f"one of {', '.join(_REASONS)}"),
    "session_id": (is_str, "a string"),
    "task_index": (is_int(0), "an int of at least 0"),
    "rollout_index": (is_int(0), "an int of at least 0"),
    "task_data": (is_dict, "a dict"),
    "info": (is_dict, "a dict"),
}


def plain_rewards(rewards: Any) -> Any:
    """Convert rewards given as an array, a tensor, or a NumPy or torch scalar to plain Python numbers."""
    return rewards.tolist() if callable(getattr(rewards, "tolist", None)) else rewards


def turn_rewards(rewards: Any, num_turns: int, what: str) -> list[float]:
    """Return the reward of each turn, (K,).

    Args:
        rewards: One number, or one per turn.
        num_turns: K, at least 1.
        what: What the recording calls a turn, for errors.

    Raises:
        ConfigError: There are several rewards but not K, or a reward is not a finite number.

    >>> turn_rewards(1, 3, "answer"), turn_rewards([0.5, 1], 2, "answer")
    ([0.0, 0.0, 1.0], [0.5, 1.0])
    """
    given = plain_rewards(rewards)
    if isinstance(given, Sequence) and not isinstance(given, str):
        values = [*cast("Sequence[Any]", given)]
        if len(values) != num_turns:
            raise ConfigError(
                f"rewards must be a single number or one number per {what} ({num_turns}), "
                f"got {len(values)}: {shown(values)}"
            )
    else:
        values = [*[0.0] * (num_turns - 1), given]
    for index, value in enumerate(values):
        if not is_number()(value):
            raise ConfigError(f"rewards must be finite numbers, got {shown(value)} for {what} {index}")
    return [float(value) for value in values]


def check_tokenizer(value: Any) -> None:
    """Check that a value is a tokenizer or None.

    Raises:
        ConfigError: The value is something else, such as the name of a model.
    """
    require(
        "tokenizer", value, lambda given: given is None or hasattr(given, "decode"), "a transformers tokenizer or None"
    )


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Check the metadata of a recording, and return it with a stop reason."""
    for name, value in metadata.items():
        if name not in _VALID:
            raise ConfigError(f"{name!r} is not a metadata field of a recorded rollout{did_you_mean(name, _VALID)}")
        valid, expected = _VALID[name]
        if not valid(value):
            raise ConfigError(f"{name} must be {expected}, got {shown(value)}")
    return {**metadata, "stop_reason": StopReason(metadata.get("stop_reason", StopReason.DONE))}


def build_trajectory(
    token_ids: Sequence[int],
    turns: Sequence[Turn],
    messages: Sequence[Message],
    logprobs: Sequence[float] | None,
    metadata: Mapping[str, Any],
) -> Trajectory:
    """Build the trajectory, and compute its per-token rewards from the turn rewards as an environment does by default.

    There is at least one turn; tokens and log-probabilities are (T,); the metadata come from :func:`check_metadata`.
    """
    if metadata["stop_reason"] is StopReason.INVALID:  # the invalid action that exceeded ``error_allowance``
        turns = [*turns[:-1], replace(turns[-1], invalid=True)]
    trajectory = Trajectory(
        token_ids=token_ids,
        turns=turns,
        messages=messages,
        logprobs=logprobs,
        final_reward=math.fsum(turn.reward for turn in turns),
        **metadata,
    )
    return replace(trajectory, per_token_rewards=per_token_rewards(trajectory))
