"""Add up named rewards: a reward is a number, or a mapping of names to numbers, its components.

A plain number counts as the component :data:`UNNAMED`, and a component that a reward lacks counts as 0. So the sum of
the components is always the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agentsgym.types import Turn

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
