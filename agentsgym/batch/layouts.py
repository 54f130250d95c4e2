"""Lay rollouts out as training rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from agentsgym.errors import ConfigError
from agentsgym.types import Trajectory, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One training row: tokens of a rollout in which each one's context is everything before it.

    Attributes:
        rollout: Index of the rollout among those that were laid out.
        span: Its tokens, indices in the trajectory's ``token_ids``.
        turns: The turns that are trained on in it, each with its index in the trajectory.
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
        """The index of the turn whose tokens are trained on, token by token, (T,); -1 on every other token."""
        index = [-1] * len(self)
        for k, turn in self.turns:
            start = turn.start - self.span.start
            index[start : start + turn.stop - turn.start] = [k] * (turn.stop - turn.start)
        return index


Layout = Callable[[int, Trajectory], list[TrainingRow]]
"""(index of a rollout, the rollout) → its rows."""


def trajectory_rows(rollout: int, trajectory: Trajectory) -> list[TrainingRow]:
    """One row per rollout, up to its last action.

    Raises:
        ConfigError: Its history was rewritten, so that no one row is true.
    """
    if len(trajectory.segments) > 1:
        raise ConfigError(
            "layout='trajectory' trains one row per rollout, which needs a history that only grows, got a rollout "
            f"whose history was rewritten {len(trajectory.segments) - 1} times: use layout='turn'"
        )
    # Tokens after the last action, such as the environment's last message, are the context of no action.
    stop = trajectory.turns[-1].stop if trajectory.turns else len(trajectory.token_ids)
    return [TrainingRow(rollout=rollout, span=range(stop), turns=[*enumerate(trajectory.turns)])]


def turn_rows(rollout: int, trajectory: Trajectory, *, merge: bool = True) -> list[TrainingRow]:
    """One row per turn, its prompt and its action; with ``merge``, turns that extend each other share one row.

    Merged rows hold the same turns in the same contexts with each token once. A rollout whose history only grew is
    then one row, and one whose history was rewritten one row per segment.

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
        TrainingRow(rollout=rollout, span=range(own[0][1].prompt_start, own[-1][1].stop), turns=own)
        for own in turns.values()
    ] or trajectory_rows(rollout, trajectory)


LAYOUTS: Final[Mapping[str, Layout]] = {"trajectory": trajectory_rows, "turn": turn_rows}
