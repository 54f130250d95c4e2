"""Convert rollouts to rows for TRL: one per rollout, or one per distinct advantage in a rollout.

TRL applies one number per row, its reward minus the group's mean, to every token that ``env_mask`` marks. A rollout
whose turns have different advantages therefore requires several rows, each of which marks the turns of one advantage::

    rollout     prompt  a1  o1  a2  o2  a3          advantages 0.5, -1, 0.5
    row 0       prompt  a1  o1  a2  o2  a3          marks a1 and a3, reward  0.5
    row 1       prompt  a1  o1  a2                  marks a2,        reward -1.0
    balance     one token                           marks nothing,   reward  0.5     makes the group's mean 0

Since the rewards sum to 0, TRL subtracts 0, and every token is trained with its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentsgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRow:
    """One row of a stock trainer.

    Attributes:
        rollout: The rollout that the row belongs to; None for a row that only contributes its reward.
        advantages: One number per token of the rollout, (T,); empty if they are unknown.
        positions: The tokens of the rollout that are trained on, in order.
        reward: The number that TRL compares within the group; None for a failed rollout, which is excluded.
        is_first: Whether this is the rollout's first row, for metrics that count each rollout once.
    """

    rollout: Trajectory | None
    reward: float | None
    advantages: Sequence[float] = ()
    positions: Sequence[int] = ()
    is_first: bool = True

    def columns(self, filler: int) -> dict[str, Any]:
        """Return the row's entries of the dict that TRL expects, by key.

        ``filler`` is a token for otherwise empty entries: TRL reads the last token of every row.
        """
        rollout = self.rollout
        if rollout is None or not rollout.turns or not rollout.token_ids:
            columns: dict[str, Any] = {
                "prompt_ids": [filler],
                "completion_ids": [filler],
                "logprobs": [0.0],
                "env_mask": [0],
            }
            columns |= {"step_rewards": [], "final_reward": None if rollout is None else rollout.final_reward}
            columns |= {"step_components": None, "final_components": None}
            first = 0
        else:
            columns = rollout.to_rollout()
            first = rollout.turns[0].start
        length = self.positions[-1] + 1 - first if self.positions else len(columns["completion_ids"])
        marked = set(self.positions)
        mask = [int(first + place in marked) for place in range(length)]
        logprobs = columns["logprobs"]
        return columns | {
            "prompt_ids": columns["prompt_ids"] or [filler],
            "completion_ids": columns["completion_ids"][:length] or [filler],
            "logprobs": None if logprobs is None else logprobs[:length] or [0.0],
            "env_mask": mask or [0],
            "action_mask": mask or [0],
            "advantages": list(self.advantages[first : first + length]) or [0.0] * (length or 1),
            "stop_reason": None if rollout is None else str(rollout.stop_reason),
            "success": None if rollout is None else rollout.success,
            "row_reward": self.reward,
            "is_first_row": self.is_first and rollout is not None,
        }


def agent_positions(trajectory: Trajectory) -> list[int]:
    """Return the positions of the agent's trainable tokens, in order; a row's first token is excluded."""
    return [place for turn in trajectory.turns for place in range(max(1, turn.start), turn.stop)]


def whole_row(trajectory: Trajectory, advantages: Sequence[float], *, included: bool) -> StockRow:
    """Make a rollout's only row, whose reward is the final reward; the advantages, (T,), are for reward functions."""
    positions = agent_positions(trajectory) if included else []
    reward = averaged_exactly(trajectory.final_reward) if included else None
    return StockRow(rollout=trajectory, advantages=advantages, positions=positions, reward=reward)


def averaged_exactly(reward: float) -> float:
    """Round a reward to 16 significant bits, so that the float32 mean of up to 256 equal rewards is exact.

    TRL divides the difference between a reward and its group's mean by the group's standard deviation: with eight
    rewards of 0.1, rounding of the sum makes the deviation 8e-9 rather than 0, and a group without signal would train
    on noise.

    >>> averaged_exactly(0.5), averaged_exactly(-0.1)
    (0.5, -0.10000038146972656)
    """
    mantissa, exponent = math.frexp(reward)
    return math.ldexp(round(mantissa * 2**16), exponent - 16)


@dataclass(slots=True, kw_only=True)
class _Level:
    """Tokens of one rollout that share an advantage.

    Attributes:
        value: The advantage; after joining, its mean over the tokens.
        positions: The positions of the tokens.
    """

    value: float
    positions: list[int] = field(default_factory=list[int])

    def cost_of_joining(self, other: _Level) -> float:
        """Return the increase in the total squared error over tokens if both levels shared their mean (Ward 1963)."""
        one, two = len(self.positions), len(other.positions)
        return one * two / (one + two) * (self.value - other.value) ** 2

    def join(self, other: _Level) -> None:
        """Add the tokens of another level to this one."""
        one, two = len(self.positions), len(other.positions)
        self.value = (one * self.value + two * other.value) / (one + two)
        self.positions = sorted([*self.positions, *other.positions])


def group_rows(
    trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]], included: Sequence[bool], num_rows: int
) -> tuple[list[StockRow], int]:
    """Make exactly ``num_rows`` rows of one task group's rollouts, so that each token keeps its advantage.

    If the rollouts have more distinct advantages than there are rows, the closest ones within a rollout are replaced
    with their mean over tokens, as few as necessary.

    Args:
        trajectories: The rollouts of one task, (n,), fewer than ``num_rows``.
        advantages: One number per token of each rollout, (n, T).
        included: Whether each rollout is trained on, (n,).
        num_rows: TRL's ``num_generations``.

    Returns:
        The rows, whose rewards sum to 0, and the number of joins.
    """
    levels = [
        _levels(trajectory, own) if counts else []
        for trajectory, own, counts in zip(trajectories, advantages, included, strict=True)
    ]
    # A rollout without trained tokens gets a row that marks nothing, so that metrics include it.
    num_bare = sum(not own for own in levels)
    num_joined = 0
    while sum(map(len, levels)) + num_bare > num_rows - 1:
        neighbors = [(own, index) for own in levels for index in range(len(own) - 1)]
        own, index = min(neighbors, key=lambda pair: pair[0][pair[1]].cost_of_joining(pair[0][pair[1] + 1]))
        own[index].join(own.pop(index + 1))
        num_joined += 1
    rows = [
        StockRow(
            rollout=trajectory, advantages=row, positions=level.positions, reward=level.value, is_first=level is own[0]
        )
        for trajectory, row, own in zip(trajectories, advantages, levels, strict=True)
        for level in own
    ]
    rows += [StockRow(rollout=one, reward=0.0) for one, own in zip(trajectories, levels, strict=True) if not own]
    balance = -sum(row.reward or 0.0 for row in rows)
    rows.append(StockRow(rollout=None, reward=balance))
    rows += [StockRow(rollout=None, reward=0.0)] * (num_rows - len(rows))
    return rows, num_joined


def _levels(trajectory: Trajectory, advantages: Sequence[float]) -> list[_Level]:
    """Group the tokens of a rollout by advantage, in increasing order."""
    found: dict[float, _Level] = {}
    for place in agent_positions(trajectory):
        value = advantages[place]
        found.setdefault(value, _Level(value=value)).positions.append(place)
    return [found[value] for value in sorted(found)]
