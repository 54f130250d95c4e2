"""Add up named rewards, and assign the rewards of roles to turns.

A reward is a number, or a mapping of names to numbers, its components. A plain number counts as the component
:data:`UNNAMED`, and a component that a reward lacks counts as 0. So the sum of the components is always the reward.

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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agentsgym.texts import shown
from agentsgym.types import Trajectory, Turn

UNNAMED: Final = "reward"
"""The name of rewards that are given as plain numbers."""

GivenReward = float | Mapping[str, float]
"""A reward as an environment returns it."""

Reward = tuple[float, Mapping[str, float] | None]
"""A reward and its components; None for a plain number."""


def sum_components(rewards: Iterable[Reward], add: Callable[[list[float]], float] = sum) -> dict[str, float] | None:
    """Sum rewards by component; None if all are plain numbers.

    Args:
        rewards: The rewards.
        add: The function that sums the rewards themselves, so that a single component is exactly the reward.

    >>> sum_components([(1.5, {"correct": 1.0, "format": 0.5}), (0.25, {"format": 0.25}), (2.0, None)])
    {'correct': 1.0, 'format': 0.75, 'reward': 2.0}
    >>> sum_components([(1.0, None), (2.0, None)]) is None
    True
    """
    given = [*rewards]
    if all(components is None for _, components in given):
        return None
    if len(given) == 1:
        return dict(given[0][1] or ())
    amounts: dict[str, list[float]] = {}
    for reward, components in given:
        for name, amount in (by_name(reward, None) if components is None else components).items():
            if name in amounts:
                amounts[name].append(amount)
            else:
                amounts[name] = [amount]
    return {name: float(add(own)) for name, own in amounts.items()}


def add_rewards(rewards: Iterable[GivenReward]) -> GivenReward:
    """Add up rewards as an environment returns them; a number unless one of them is a mapping.

    >>> add_rewards([0.5, {"search": 0.25}, {"search": 0.5}]), add_rewards([0.5, 1])
    ({'reward': 0.5, 'search': 0.75}, 1.5)
    """
    given: list[Any] = [*rewards]
    if not any(isinstance(one, Mapping) for one in given):
        return float(sum(given))
    parts: list[Reward] = [(0.0, one) if isinstance(one, Mapping) else (one, None) for one in given]
    return sum_components(parts) or {}


def by_name(reward: float, components: Mapping[str, float] | None) -> Mapping[str, float]:
    """Return the components of a reward; a plain number other than 0 is :data:`UNNAMED`.

    >>> by_name(1.0, None), by_name(0.0, None)
    ({'reward': 1.0}, {})
    """
    if components is not None:
        return components
    return {UNNAMED: reward} if reward else {}


def names_of(rewards: Iterable[Reward]) -> list[str]:
    """The names of all components, in the order in which they first appear; empty if all are plain numbers."""
    given = list(rewards)
    if all(components is None for _, components in given):
        return []
    return [*dict.fromkeys(name for reward, components in given for name in by_name(reward, components))]


def amounts_of(name: str, rewards: Sequence[Reward]) -> list[float]:
    """The numbers of one component, 0.0 where a reward lacks it."""
    return [by_name(reward, components).get(name, 0.0) for reward, components in rewards]


def role_components(turns: Sequence[Turn]) -> dict[Hashable, dict[str, float]]:
    """The components of each role's rewards, summed over its turns; empty without rewards by role."""
    if all(turn.role_rewards is None for turn in turns):
        return {}
    rewards: dict[Hashable, list[Reward]] = {}
    for turn in turns:
        rewards.setdefault(turn.role, []).append((turn.reward, turn.components))
    found = {role: sum_components(own) for role, own in rewards.items()}
    return {role: components for role, components in found.items() if components is not None}


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
