"""Say which turn bears what each role of a game is paid.

A game of several seats pays roles, not turns: at one step the winner gets 1 and the loser -1. Each turn bears what *its
own* role is paid from its step up to the role's next turn::

    step             0        1        2        3        4
    moves            X        O        X        O        X
    paid          O: -0.1           X: 0.2           X: 1, O: -1
    reward           0      -0.1      0.2      -1        1

What a role is paid after its last move lies on that move, and what it is paid before its first lies on its first. So
the return of a turn, the sum of its role's rewards from it on, is all that the role was paid from then on. A role that
never moves is paid, and no turn bears it. Each episode of a trial is settled by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from agentsgym.texts import shown
from agentsgym.types import Trajectory, Turn


def attributed(turns: Sequence[Turn]) -> tuple[list[Turn], dict[Hashable, float]]:
    """Put what each role was paid on its own turns.

    Args:
        turns: The turns as they were played. A step that does not say whom it pays (``role_rewards`` is None) pays the
            role that moved.

    Returns:
        The turns with the rewards that they bear, and what each role was paid in all, those that moved first; the turns
        as they are, and nothing, where no step says whom it pays.

    >>> moves = [("X", {}), ("O", {}), ("X", {"X": 1.0, "O": -1.0})]
    >>> turns = [Turn(start=0, stop=0, reward=0.0, role=role, role_rewards=paid) for role, paid in moves]
    >>> settled, final_rewards = attributed(turns)
    >>> [turn.reward for turn in settled], final_rewards
    ([0.0, -1.0, 1.0], {'X': 1.0, 'O': -1.0})
    """
    if all(turn.role_rewards is None for turn in turns):
        return list(turns), {}
    last: dict[tuple[int, Hashable], int] = {}  # by episode and role; before a role's first turn it is that one
    for k in reversed(range(len(turns))):
        last[turns[k].episode, turns[k].role] = k
    amounts: list[list[float]] = [[] for _ in turns]
    paid: defaultdict[Hashable, list[float]] = defaultdict(list, {turn.role: [] for turn in turns})
    for k, turn in enumerate(turns):
        last[turn.episode, turn.role] = k
        for role, amount in _payments(turn).items():
            paid[role].append(amount)
            bearer = last.get((turn.episode, role))
            if bearer is not None:
                amounts[bearer].append(amount)
    settled = [replace(turn, reward=math.fsum(own)) for turn, own in zip(turns, amounts, strict=True)]
    return settled, {role: math.fsum(own) for role, own in paid.items()}


def total_error(trajectory: Trajectory, *, is_sum: bool) -> str:
    """Say why a trajectory's final rewards are not what its turns were paid; empty if they are.

    Args:
        trajectory: A rollout that did not fail, all of whose rewards are finite.
        is_sum: Whether its final reward must be the sum of its turn rewards, where it does not pay by role.
    """
    rewards = [turn.reward for turn in trajectory.turns]
    settled, paid = attributed(trajectory.turns)
    if trajectory.final_rewards != paid or [turn.reward for turn in settled] != rewards:
        return f"turn rewards and final_rewards must be what each role was paid, {shown(paid)}"
    right = paid[trajectory.turns[0].role] if paid else math.fsum(rewards)
    if (paid or is_sum) and not math.isclose(trajectory.final_reward, right, rel_tol=1e-6, abs_tol=1e-6):
        whose = "that of the first turn's role" if paid else "the sum of the turn rewards"
        return f"final_reward must be {whose}, {right!r}, got {shown(trajectory.final_reward)}"
    return ""


def _payments(turn: Turn) -> Mapping[Hashable, float]:
    return {turn.role: turn.reward} if turn.role_rewards is None else turn.role_rewards
