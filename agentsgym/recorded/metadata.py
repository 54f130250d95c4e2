"""The metadata of a recording: the rewards of its turns, and the identity of its rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypedDict, cast

from agentsgym.credit.rewards import per_token_rewards
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_int, is_number, is_str, require
from agentsgym.texts import shown
from agentsgym.types import Message, StopReason, Trajectory, Turn

Rewards = float | Sequence[float]
"""One number in total, for the last turn, or one per turn, (K,)."""


class About(TypedDict, total=False):
    """The metadata of a recorded rollout; the defaults are those of :class:`~agentsgym.types.Trajectory`.

    Attributes:
        stop_reason: The reason why it ended, a :class:`~agentsgym.types.StopReason` or its value; ``"done"`` by
            default.
        session_id: The session's name.
        task_index: The index of its task; rollouts of equal index are compared with each other.
        rollout_index: The index among the rollouts of that task.
        task_data: The task.
        info: The environment's final info; ``info["success"]`` is whether the task was solved.
    """

    stop_reason: StopReason | str
    session_id: str
    task_index: int
    rollout_index: int
    task_data: Mapping[str, Any]
    info: Mapping[str, Any]


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


_VALID: Final[Mapping[str, tuple[Check, str]]] = {
    "stop_reason": (
        lambda value: value in _REASONS,
        f"one of {', '.join(one for one in StopReason if one != 'failed')}",
    ),
    "session_id": (is_str, "a string"),
    "task_index": (is_int(0), "an int from 0 on"),
    "rollout_index": (is_int(0), "an int from 0 on"),
    "task_data": (_is_dict, "a dict"),
    "info": (_is_dict, "a dict"),
}
_REASONS: Final = [one for one in StopReason if one is not StopReason.FAILED]


def plain_rewards(rewards: Any) -> Any:
    """Convert the rewards of an array or a tensor, scalars included, to plain numbers."""
    return rewards.tolist() if callable(getattr(rewards, "tolist", None)) else rewards


def turn_rewards(rewards: Any, num_turns: int, what: str) -> list[float]:
    """Return the reward of each turn, (K,).

    Args:
        rewards: One number, or one per turn.
        num_turns: K, at least 1.
        what: The name of a turn in the recording, for errors.

    Raises:
        ConfigError: The number of rewards does not match, or one is not a finite number.

    >>> turn_rewards(1, 3, "answer"), turn_rewards([0.5, 1], 2, "answer")
    ([0.0, 0.0, 1.0], [0.5, 1.0])
    """
    given = plain_rewards(rewards)
    if isinstance(given, Sequence) and not isinstance(given, str):
        values = [*cast("Sequence[Any]", given)]
        if len(values) != num_turns:
            raise ConfigError(
                f"rewards must be one number, or one for each {what}: {num_turns}, got {len(values)}: {shown(values)}"
            )
    else:
        values = [*[0.0] * (num_turns - 1), given]
    for index, value in enumerate(values):
        if not is_number()(value):
            raise ConfigError(f"rewards must be finite numbers, got {shown(value)} for {what} {index}")
    return [float(value) for value in values]


def check_tokenizer(value: Any) -> None:
    """Check that a value is a tokenizer, or None.

    Raises:
        ConfigError: The value is something else, such as the name of a model.
    """
    require(
        "tokenizer", value, lambda one: one is None or hasattr(one, "decode"), "a tokenizer of transformers or None"
    )


def checked_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """Check the metadata of a recording.

    Raises:
        ConfigError: A name is unknown, or a value is invalid. Failed is not a valid stop reason: there is nothing to
            learn from such a rollout.
    """
    for name, value in about.items():
        if name not in _VALID:
            raise ConfigError(f"a recorded rollout has no {name!r}{did_you_mean(name, _VALID)}")
        valid, expected = _VALID[name]
        if not valid(value):
            raise ConfigError(f"{name} must be {expected}, got {shown(value)}")
    return {**about, "stop_reason": StopReason(about.get("stop_reason", StopReason.DONE))}


def finished(
    token_ids: Sequence[int],
    turns: Sequence[Turn],
    messages: Sequence[Message],
    logprobs: Sequence[float] | None,
    about: Mapping[str, Any],
) -> Trajectory:
    """Make the trajectory, its rewards spread over the tokens of their turns, as an environment does by default.

    Args:
        token_ids: The tokens, (T,).
        turns: The turns, at least one, with their rewards.
        messages: The conversation.
        logprobs: The log-probabilities, (T,), or None.
        about: The result of :func:`checked_about`.
    """
    if about["stop_reason"] is StopReason.INVALID:  # the last action exceeded the allowance
        turns = [*turns[:-1], replace(turns[-1], invalid=True)]
    trajectory = Trajectory(
        token_ids=token_ids,
        turns=turns,
        messages=messages,
        logprobs=logprobs,
        final_reward=math.fsum(turn.reward for turn in turns),
        **about,
    )
    return replace(trajectory, per_token_rewards=per_token_rewards(trajectory))
