"""Which tokens stand together: training rows, and the transitions of ``generate`` with their flat form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from agentsgym.credit.rewards import credited_turn_rewards
from agentsgym.errors import ConfigError
from agentsgym.types import Message, Trajectory, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training row: tokens of a rollout in which each one's context is all that stands before it.

    Attributes:
        rollout: Index of the rollout among those that were laid out.
        span: Its tokens, indices in the trajectory's ``token_ids``.
        turns: The turns that are learnt in it, each with its index in the trajectory.
    """

    rollout: int
    span: range
    turns: Sequence[tuple[int, Turn]]

    def __len__(self) -> int:
        return len(self.span)

    def cut(self, values: Sequence[T]) -> list[T]:
        """Take from one value a token of the trajectory those of this row, (T,)."""
        return list(values[self.span.start : self.span.stop])

    def turn_index(self) -> list[int]:
        """The index of the turn that each token is learnt in, (T,); -1 on every other token."""
        index = [-1] * len(self)
        for k, turn in self.turns:
            start = turn.start - self.span.start
            index[start : start + turn.stop - turn.start] = [k] * (turn.stop - turn.start)
        return index


Layout = Callable[[int, Trajectory], list[Row]]
"""(index of a rollout, the rollout) → its rows."""


def trajectory_rows(rollout: int, trajectory: Trajectory) -> list[Row]:
    """One row a rollout.

    Raises:
        ConfigError: Its history was rewritten, so that no one row is true.
    """
    if len(trajectory.segments) > 1:
        raise ConfigError(
            "layout='trajectory' trains one row a rollout, which needs a history that only grows, got a rollout whose "
            f"history was rewritten {len(trajectory.segments) - 1} times: use layout='turn'"
        )
    return [Row(rollout=rollout, span=range(len(trajectory.token_ids)), turns=[*enumerate(trajectory.turns)])]


def turn_rows(rollout: int, trajectory: Trajectory, *, merge: bool = True) -> list[Row]:
    """One row a turn, its prompt and what was said; with ``merge`` turns that extend each other share one row.

    Merged rows hold the same turns in the same contexts with each token once. A rollout whose history only grew is
    then one row, and one whose history was rewritten one row a segment.

    Args:
        rollout: Index of the rollout.
        trajectory: The rollout.
        merge: Whether turns that extend each other share a row.

    Returns:
        At least one row, so that a rollout without turns keeps its place.
    """
    turns: dict[int, list[tuple[int, Turn]]] = {}
    for k, turn in enumerate(trajectory.turns):
        turns.setdefault(turn.prompt_start if merge else k, []).append((k, turn))
    return [
        Row(rollout=rollout, span=range(own[0][1].prompt_start, own[-1][1].stop), turns=own) for own in turns.values()
    ] or trajectory_rows(rollout, trajectory)


LAYOUTS: Final[Mapping[str, Layout]] = {"trajectory": trajectory_rows, "turn": turn_rows}

TRANSITION_KEYS = ("ids", "prompt_ids", "messages", "mask", "rewards", "session_ids")


def transitions(
    trajectories: Sequence[Trajectory], *, turn_credit: str = "step", return_all_steps: bool = True
) -> dict[str, list[list[Any]]]:
    """Nest what was sampled, from which prompt, by rollout p and turn k.

    Args:
        trajectories: The rollouts.
        turn_credit: Which turn is paid; ``rewards`` are those amounts.
        return_all_steps: False keeps only each rollout's last turn, in single-element lists.

    Returns:
        ``ids[p][k]`` (the response's), ``prompt_ids[p][k]`` (the exact prompt it was sampled from),
        ``messages[p][k]`` (the conversation that this prompt shows, and the response), ``mask[p][k]`` (ones over
        ``ids``; zeros for a failed rollout), ``rewards[p][k]`` and ``session_ids[p][k]``.
    """
    nested: dict[str, list[list[Any]]] = {key: [] for key in TRANSITION_KEYS}
    for trajectory in trajectories:
        turns = _turns(trajectory, turn_credit)
        for key in TRANSITION_KEYS:
            rows = [turn[key] for turn in turns]
            nested[key].append(rows if return_all_steps else rows[-1:])
    return nested


def _turns(trajectory: Trajectory, turn_credit: str) -> list[dict[str, Any]]:
    counts = [turn.stop - turn.start for turn in trajectory.turns]
    rewards = credited_turn_rewards(trajectory.turn_rewards, trajectory.final_reward, counts, turn_credit)
    return [
        {
            "ids": list(trajectory.token_ids[turn.start : turn.stop]),
            "prompt_ids": list(trajectory.token_ids[turn.prompt_start : turn.start]),
            "messages": _messages(trajectory, turn),
            "mask": [0 if trajectory.failed else 1] * (turn.stop - turn.start),
            "rewards": 0.0 if trajectory.failed else reward,
            "session_ids": trajectory.session_id,
        }
        for turn, reward in zip(trajectory.turns, rewards, strict=True)
    ]


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
