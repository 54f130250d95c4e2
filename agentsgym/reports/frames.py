"""Rollouts as pandas tables, with one row per rollout, turn or token."""

# pyright: reportUnknownMemberType=false
# pandas' constructor is only partly typed.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import check_rollouts
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from pandas import DataFrame

_Rows = Callable[[Trajectory], list[dict[str, Any]]]


def rollouts_frame(trajectories: Iterable[Trajectory], by: str = "rollout") -> DataFrame:
    """Return rollouts as a table.

    Args:
        trajectories: The rollouts, in the order of the rows.
        by: The unit of a row: ``"rollout"`` (:func:`rollout_row`), ``"turn"`` (:func:`turn_rows`) or ``"token"``
            (:func:`token_rows`).

    Raises:
        ConfigError: ``by`` has another value.
    """
    kinds: dict[str, _Rows] = {"rollout": lambda one: [rollout_row(one)], "turn": turn_rows, "token": token_rows}
    check_rollouts("rollouts_frame(trajectories)", trajectories)
    if by not in kinds:
        raise ConfigError(f"by must be one of {', '.join(kinds)}, got {by!r}{did_you_mean(by, kinds)}")
    from pandas import DataFrame  # noqa: PLC0415  # takes half a second, and the HTML view does not need it

    return DataFrame(list(chain.from_iterable(map(kinds[by], trajectories))))


def rollout_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return the table row of a rollout.

    Its columns are ``task`` and ``rollout`` (indices), ``reward``, ``outcome`` ("won", "lost", "failed", or "played" if
    success is unknown), ``success`` (None if unknown), ``failed``, ``stop_reason``, ``turns``, ``invalid_turns``,
    ``tokens``, ``agent_tokens``, ``exact``, ``retries``, ``session`` and ``error`` (its first line; None if the rollout
    did not fail); ``reward/ROLE`` for each role that has a separate reward; ``rewards/NAME`` for each named reward; and
    ``info/KEY`` for each number in ``info``.
    """
    return {
        "task": trajectory.task_index,
        "rollout": trajectory.rollout_index,
        "reward": trajectory.final_reward,
        "outcome": trajectory.outcome,
        "success": trajectory.success,
        "failed": trajectory.failed,
        "stop_reason": trajectory.stop_reason.value,
        "turns": trajectory.num_turns,
        "invalid_turns": sum(turn.invalid for turn in trajectory.turns),
        "tokens": len(trajectory.token_ids),
        "agent_tokens": sum(turn.stop - turn.start for turn in trajectory.turns),
        "exact": trajectory.exact,
        "retries": trajectory.num_retries,
        "session": trajectory.session_id,
        "error": None if trajectory.error is None else trajectory.error.partition("\n")[0],
        **{f"reward/{role}": reward for role, reward in trajectory.final_rewards.items()},
        **_named(trajectory.final_components),
        **{f"info/{key}": number for key, number in trajectory.metrics.items()},
    }


def turn_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return one row per turn.

    Its columns are ``task`` and ``rollout``; ``turn`` (its index in the trajectory), ``parent`` (None without a tree of
    calls) and ``episode``; ``role``, ``reward``, ``invalid`` and ``exact``; ``start`` and ``stop`` (the span of its
    tokens), ``tokens``, ``prompt_tokens``; ``logprob`` (the sum over its tokens; NaN if some are unknown, None if all
    are or there are no tokens) and ``text`` (the agent's message; None if the rollout's messages do not contain it);
    and ``rewards/NAME`` for each named reward.
    """
    logprobs, messages = trajectory.logprobs, trajectory.messages
    return [
        {
            "task": trajectory.task_index,
            "rollout": trajectory.rollout_index,
            "turn": index,
            "parent": turn.parent,
            "episode": turn.episode,
            "role": turn.role,
            "reward": turn.reward,
            "invalid": turn.invalid,
            "exact": turn.exact,
            "start": turn.start,
            "stop": turn.stop,
            "tokens": turn.stop - turn.start,
            "prompt_tokens": turn.start - turn.prompt_start,
            "logprob": None if logprobs is None or turn.start == turn.stop else sum(logprobs[turn.start : turn.stop]),
            "text": messages[turn.message_index]["content"] if turn.message_index < len(messages) else None,
            **_named(turn.components),
        }
        for index, turn in enumerate(trajectory.turns)
    ]


def _named(components: Mapping[str, float] | None) -> dict[str, float]:
    return {f"rewards/{name}": amount for name, amount in (components or {}).items()}


def token_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return one row per token.

    Its columns are ``task``, ``rollout`` and ``position``; ``token_id``; ``mask`` (1 for the agent's tokens);
    ``turn`` (None for environment tokens); and ``reward`` and ``logprob``, None if unknown.
    """
    turns: list[int | None] = [None] * len(trajectory.token_ids)
    for index, turn in enumerate(trajectory.turns):
        turns[turn.start : turn.stop] = [index] * (turn.stop - turn.start)
    return [
        {
            "task": trajectory.task_index,
            "rollout": trajectory.rollout_index,
            "position": position,
            "token_id": token_id,
            "mask": int(turns[position] is not None),
            "turn": turns[position],
            "reward": trajectory.per_token_rewards[position] if trajectory.per_token_rewards else None,
            "logprob": trajectory.logprobs[position] if trajectory.logprobs and turns[position] is not None else None,
        }
        for position, token_id in enumerate(trajectory.token_ids)
    ]
