"""Lay the rollouts of a task group side by side, and say where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentsgym.viewer.plain import cut, mean_of, number, text_of
from agentsgym.viewer.rollouts import action_text, is_trained

if TYPE_CHECKING:
    from agentsgym.store.records import StoredRollout
    from agentsgym.types import Trajectory, Turn

_LONGEST: Final = 4000  # characters of one action
_LONGEST_SEEN: Final = 1000  # characters that were read before it; the conversation has all of them


def group_of(key: int, label: str, rows: Sequence[int], records: Sequence[StoredRollout]) -> dict[str, Any]:
    """Describe a task group for the page.

    Args:
        key: Its key.
        label: What it is called.
        rows: The places of its rollouts in the folder, (G,).
        records: They, (G,).
    """
    first = records[0].trajectory
    diverges = [None, *(first_difference(first, one.trajectory) for one in records[1:])]
    apart = [turn for turn in diverges if turn is not None]
    return {
        "key": key,
        "label": label,
        "members": [_member(row, one) for row, one in zip(rows, records, strict=True)],
        "common_turns": min(apart, default=len(first.turns)),
        "diverges": diverges,
    }


def label_of(record: StoredRollout, environment: str | None) -> str:
    """Call a task group by what its rollouts have in common."""
    own = record.trajectory
    task = f"task {own.task_index}" if record.group is None else f"task group {record.group}"
    when = "" if record.generation is None else f"generation {record.generation}, "
    return f"{environment or 'unknown environment'}: {when}{task}"


def first_difference(one: Trajectory, other: Trajectory) -> int | None:
    """The first turn in which two rollouts saw or did something else; None if they never did.

    Where one goes on after the other has ended, that is its first turn more.
    """
    seen_one = seen_other = 0
    for k, (own, its) in enumerate(zip(one.turns, other.turns, strict=False)):
        before, after = own.message_index + 1, its.message_index + 1
        if one.messages[seen_one:before] != other.messages[seen_other:after] or _prompts_differ(own, its):
            return k
        seen_one, seen_other = before, after
    shorter, longer = sorted((len(one.turns), len(other.turns)))
    return None if shorter == longer else shorter


def _prompts_differ(one: Turn, other: Turn) -> bool:
    """Whether a history that was rewritten reads differently."""
    if one.prompt_messages is None or other.prompt_messages is None:
        return one.prompt_messages is not other.prompt_messages
    return [*one.prompt_messages] != [*other.prompt_messages]


def _member(row: int, record: StoredRollout) -> dict[str, Any]:
    trajectory = record.trajectory
    return {
        "row": row,
        "headline": trajectory.headline,
        "outcome": trajectory.outcome,
        "final_reward": number(trajectory.final_reward),
        "stop_reason": trajectory.stop_reason.value,
        "is_trained": is_trained(record),
        "turns": [_turn(record, turn, seen) for turn, seen in zip(trajectory.turns, _seen(trajectory), strict=True)],
    }


def _seen(trajectory: Trajectory) -> list[str]:
    """What was said before each action, since the action before it."""
    begins = [0, *(turn.message_index + 1 for turn in trajectory.turns)]
    return [
        "\n".join(text_of(one.get("content")) for one in trajectory.messages[begin : turn.message_index])
        for begin, turn in zip(begins, trajectory.turns, strict=False)
    ]


def _turn(record: StoredRollout, turn: Turn, seen: str) -> Mapping[str, Any]:
    text, left_out = action_text(record.trajectory, turn, _LONGEST)
    given = record.advantages[turn.start : turn.stop] if record.advantages is not None else ()
    return {
        "seen": cut(seen, _LONGEST_SEEN)[0],
        "text": text,
        "left_out": left_out,
        "reward": number(turn.reward),
        "advantage": number(mean_of(given)),
        "invalid": turn.invalid,
    }
