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
    """One training row: tokens of a rollout, where the context of each token is all tokens before it in the row.

    Attributes:
        rollout: Index of the rollout among those that were laid out.
        span: The row's tokens, as indices in the trajectory's ``token_ids``.
        turns: The turns that are trained on in this row, each with its index in the trajectory.
    """

    rollout: int
    span: range
    turns: Sequence[tuple[int, Turn]]

    def __len__(self) -> int:
        return len(self.span)

    def cut(self, values: Sequence[T]) -> list[T]:
        """Return this row's part of values that have one entry per token of the trajectory, (T,)."""
        return list(values[self.span.start : self.span.stop])

    def turn_index(self) -> list[int]:
        """For each token, the index of its turn if the token is trained on, and -1 otherwise, (T,)."""
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
        ConfigError: The history was rewritten, so the rollout cannot be represented as one row.
    """
    if len(trajectory.segments) > 1:
        raise ConfigError(
            "layout='trajectory' trains one row per rollout, which requires a history that only grows, but a rollout's "
            f"history was rewritten {len(trajectory.segments) - 1} times: use layout='turn'"
        )
    # Tokens after the last action, such as the environment's last message, are not context for any action.
    stop = trajectory.turns[-1].stop if trajectory.turns else len(trajectory.token_ids)
    return [TrainingRow(rollout=rollout, span=range(stop), turns=[*enumerate(trajectory.turns)])]


def turn_rows(rollout: int, trajectory: Trajectory, *, merge: bool = True) -> list[TrainingRow]:
    """One row per turn, with its prompt and its action; with ``merge``, turns that extend each other share one row.

    Merged rows contain the same turns in the same contexts, but each token only once: one row per segment of the
    rollout, and so a single row if the history only grew.

    Returns:
        At least one row, even for a rollout without turns.
    """
    turns: dict[int, list[tuple[int, Turn]]] = {}
    for k, turn in enumerate(trajectory.turns):
        turns.setdefault(turn.prompt_start if merge else k, []).append((k, turn))
    return [
        TrainingRow(rollout=rollout, span=range(own[0][1].prompt_start, own[-1][1].stop), turns=own)
        for own in turns.values()
    ] or trajectory_rows(rollout, trajectory)


LAYOUTS: Final[Mapping[str, Layout]] = {"trajectory": trajectory_rows, "turn": turn_rows}
