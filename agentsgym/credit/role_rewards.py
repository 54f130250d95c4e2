"""Assign the rewards of roles to turns.

A multi-agent environment rewards roles, not turns: in one step, the winner may get 1 and the loser -1. Each turn gets
the rewards of *its own* role from its step up to the role's next turn::

    step             0        1        2        3        4
    moves            X        O        X        O        X
    rewards       O: -0.1           X: 0.2           X: 1, O: -1
    turn reward      0      -0.1      0.2      -1        1

Rewards after a role's last move go to that move, and rewards before its first move go to its first. So the return of a
turn is the sum of its role's rewards from then on. The rewards of a role that never moves go to no turn. Each episode
of a trial is handled separately.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from agentsgym.credit.components import Reward, sum_components
from agentsgym.texts import shown
from agentsgym.types import Trajectory, Turn


def attribute_rewards(turns: Sequence[Turn]) -> tuple[list[Turn], dict[Hashable, float]]:
    """Assign the rewards of each role to its own turns.

    Args:
        turns: The turns as played. The reward of a step without ``role_rewards`` goes to the role that moved.

    Returns:
        The turns with their role's rewards, and the total of each role, in the order of their first moves; the turns
        unchanged and no totals if no step has ``role_rewards``.

    >>> moves = [("X", {}), ("O", {}), ("X", {"X": 1.0, "O": -1.0})]
    >>> turns = [Turn(start=0, stop=0, reward=0.0, role=role, role_rewards=given) for role, given in moves]
    >>> settled, final_rewards = attribute_rewards(turns)
    >>> [turn.reward for turn in settled], final_rewards
    ([0.0, -1.0, 1.0], {'X': 1.0, 'O': -1.0})
    """
    if all(turn.role_rewards is None for turn in turns):
        return list(turns), {}
    amounts, totals = _rewards_by_turn_and_role(turns)
    settled = [
        replace(turn, reward=math.fsum(amount for amount, _ in own), components=sum_components(own, math.fsum))
        for turn, own in zip(turns, amounts, strict=True)
    ]
    return settled, {role: math.fsum(amount for amount, _ in own) for role, own in totals.items()}


def _rewards_by_turn_and_role(turns: Sequence[Turn]) -> tuple[list[list[Reward]], Mapping[Hashable, list[Reward]]]:
    """Collect the rewards that each turn gets, (K,), and those of each role."""
    last: dict[tuple[int, Hashable], int] = {}  # latest turn by (episode, role); until a role has acted, its first turn
    for k in reversed(range(len(turns))):
        last[turns[k].episode, turns[k].role] = k
    amounts: list[list[Reward]] = [[] for _ in turns]
    totals: defaultdict[Hashable, list[Reward]] = defaultdict(list, {turn.role: [] for turn in turns})
    for k, turn in enumerate(turns):
        last[turn.episode, turn.role] = k
        given, named = turn.role_rewards, turn.role_components or {}
        if given is None:
            given, named = {turn.role: turn.reward}, {turn.role: turn.components}
        for role, amount in given.items():
            totals[role].append(reward := (amount, named.get(role)))
            if (own := last.get((turn.episode, role))) is not None:
                amounts[own].append(reward)
    return amounts, totals


def reward_mismatch(trajectory: Trajectory, *, is_sum: bool) -> str:
    """Explain why a trajectory's final rewards do not match its turns; empty if they do.

    Args:
        trajectory: A rollout that did not fail, all of whose rewards are finite.
        is_sum: Whether, without rewards by role, the final reward must be the sum of the turn rewards.
    """
    rewards = [turn.reward for turn in trajectory.turns]
    settled, totals = attribute_rewards(trajectory.turns)
    if trajectory.final_rewards != totals:
        return f"final_rewards must be the totals by role, {shown(totals)}, got {shown(trajectory.final_rewards)}"
    if (expected := [turn.reward for turn in settled]) != rewards:
        return f"turn rewards must be the rewards of each turn's role, {shown(expected)}, got {shown(rewards)}"
    right = totals[trajectory.turns[0].role] if totals else math.fsum(rewards)
    if (totals or is_sum) and not math.isclose(trajectory.final_reward, right, rel_tol=1e-6, abs_tol=1e-6):
        whose = "the total of the first turn's role" if totals else "the sum of the turn rewards"
        return f"final_reward must be {whose}, {right!r}, got {shown(trajectory.final_reward)}"
    return ""
