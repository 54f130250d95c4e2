"""Rollouts, turns and tokens as rows of tables, for pandas.

::

    Evaluation ─▶ one row a rollout ─▶ one row a turn ─▶ one row a token
"""

# pyright: reportUnknownMemberType=false
# pandas types its constructor in part only.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.types import Trajectory, Turn

if TYPE_CHECKING:
    from pandas import DataFrame

    from agentsgym.statistics.metrics import Evaluation

Rows = Callable[[Trajectory], list[dict[str, Any]]]


def evaluation_frame(evaluation: Evaluation, by: str = "rollout") -> DataFrame:
    """Return an evaluation's rollouts as a table, one row per rollout or turn: see :func:`rollouts_frame`."""
    return rollouts_frame(evaluation.trajectories, by)


def trajectory_frame(trajectory: Trajectory, by: str = "turn") -> DataFrame:
    """Return one rollout as a table, one row per turn or token: see :func:`turn_rows` and :func:`token_rows`.

    Raises:
        ConfigError: ``by`` is neither.
    """
    return _frame([trajectory], _chosen(by, {"turn": turn_rows, "token": token_rows}))


def rollouts_frame(trajectories: Iterable[Trajectory], by: str = "rollout") -> DataFrame:
    """Return rollouts as a table.

    Args:
        trajectories: The rollouts, in the order of the rows.
        by: The unit of a row: ``"rollout"`` (:func:`rollout_row`), ``"turn"`` (:func:`turn_rows`) or ``"token"``
            (:func:`token_rows`).

    Raises:
        ConfigError: ``by`` is none of these.
    """
    kinds: dict[str, Rows] = {"rollout": lambda one: [rollout_row(one)], "turn": turn_rows, "token": token_rows}
    return _frame(trajectories, _chosen(by, kinds))


def rollout_row(trajectory: Trajectory) -> dict[str, Any]:
    """Describe a rollout in a row.

    ``task`` and ``rollout`` (indices), ``reward``, ``outcome`` ("won", "lost", "failed", "played"), ``success`` (None
    where the environment does not say), ``failed``, ``stop_reason``, ``turns``, ``invalid_turns``, ``tokens``,
    ``agent_tokens``, ``exact``, ``retries``, ``session`` and ``error`` (its first line; None if it did not fail). Where
    the game pays by role, ``reward/ROLE`` is what each was paid. ``info/KEY`` is each number of ``info``.
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
        **{f"reward/{role}": paid for role, paid in trajectory.final_rewards.items()},
        **{f"info/{key}": number for key, number in trajectory.metrics.items()},
    }


def turn_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Describe each turn in a row.

    ``task`` and ``rollout``; ``turn`` (k of the trajectory, from 0) and ``episode``; ``role``, ``reward``, ``invalid``
    and ``exact``; ``start`` and ``stop`` (its span of tokens), ``tokens``, ``prompt_tokens``; ``logprob`` (the sum over
    its tokens; NaN where one is not known, and where it has no tokens) and ``text`` (what the agent said).
    """
    return [
        {
            "task": trajectory.task_index,
            "rollout": trajectory.rollout_index,
            "turn": index,
            "episode": turn.episode,
            "role": turn.role,
            "reward": turn.reward,
            "invalid": turn.invalid,
            "exact": turn.exact,
            "start": turn.start,
            "stop": turn.stop,
            "tokens": turn.stop - turn.start,
            "prompt_tokens": turn.start - turn.prompt_start,
            "logprob": _logprob_of(trajectory, turn),
            "text": _text_of(trajectory, turn),
        }
        for index, turn in enumerate(trajectory.turns)
    ]


def token_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Describe each token in a row.

    ``task``, ``rollout`` and ``position``; ``token_id``; ``mask`` (1 for the agent's); ``turn`` (None for a token of
    the environment); ``reward``, and ``logprob`` where they are known.
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


def _logprob_of(trajectory: Trajectory, turn: Turn) -> float | None:
    """Sum the log-probabilities of a turn's tokens; None where they are not known, or it has none."""
    if trajectory.logprobs is None or turn.start == turn.stop:
        return None
    return sum(trajectory.logprobs[turn.start : turn.stop])


def _text_of(trajectory: Trajectory, turn: Turn) -> str | None:
    """The agent's text; None if the trajectory's messages do not contain it."""
    messages: Sequence[Any] = trajectory.messages
    return messages[turn.message_index]["content"] if turn.message_index < len(messages) else None


def _chosen(by: str, kinds: dict[str, Rows]) -> Rows:
    if by not in kinds:
        raise ConfigError(f"by must be one of {', '.join(kinds)}, got {by!r}{did_you_mean(str(by), kinds)}")
    return kinds[by]


def _frame(trajectories: Iterable[Trajectory], rows_of: Rows) -> DataFrame:
    from pandas import DataFrame  # noqa: PLC0415  # takes half a second, and a notebook's HTML does without it

    return DataFrame(list(chain.from_iterable(map(rows_of, trajectories))))
