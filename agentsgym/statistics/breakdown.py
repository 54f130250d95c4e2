"""Tell rollouts apart by the role that played and by the environment that was played."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentsgym.types import StopReason


class RolloutOutcome(Protocol):
    """What an evaluation reads of a rollout: a :class:`~agentsgym.types.Trajectory` has it, and so may a summary."""

    @property
    def stop_reason(self) -> StopReason:
        """Why it ended."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the environment or the agent broke."""
        ...

    @property
    def success(self) -> bool | None:
        """Whether it was won; None if the environment does not say."""
        ...

    @property
    def final_reward(self) -> float:
        """Its reward."""
        ...

    @property
    def num_turns(self) -> int:
        """Its turns."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers that its environment gave in ``info``."""
        ...

    @property
    def roles(self) -> Sequence[Hashable]:
        """Who the agent was in each turn, (K,); empty for None in all turns."""
        ...

    @property
    def final_rewards(self) -> Mapping[Hashable, float]:
        """What each role was paid in all; empty where the game does not pay by role."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatOutcome:
    """What came of one rollout for one of its roles: a :class:`RolloutOutcome` itself.

    Attributes:
        role: The role.
        stop_reason: Why the rollout ended.
        success: Whether the role won; None if that is not known.
        final_reward: What the role was paid in all.
        num_turns: The role's turns.
        failed: Whether the environment or the agent broke.
    """

    role: Hashable
    stop_reason: StopReason
    success: bool | None
    final_reward: float
    num_turns: int
    failed: bool

    @property
    def roles(self) -> Sequence[Hashable]:
        """The role, once."""
        return (self.role,)

    @property
    def final_rewards(self) -> Mapping[Hashable, float]:
        """Nothing: the reward is of one role already."""
        return {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """Nothing: they are the rollout's, not the role's."""
        return {}


def seat_outcomes(rollout: RolloutOutcome) -> list[SeatOutcome]:
    """Take a rollout apart by the roles that had a turn in it.

    In a rollout of one role the role won if ``info["success"]`` says so. Among several that are paid differently it won
    if it was paid more than every other role of the game; where all are paid alike, as those who play together are, or
    after a draw, ``info["success"]`` is that of each.

    Returns:
        One a role, by the roles' first turns; none of a role whose pay the rollout does not say where it says that of
        others, of a rollout without named roles, or with several of which the game does not say what each was paid.
    """
    roles = dict.fromkeys(role for role in rollout.roles if role is not None)
    paid = rollout.final_rewards
    if len(roles) > 1 and not paid and not rollout.failed:
        return []
    return [
        SeatOutcome(
            role=role,
            stop_reason=rollout.stop_reason,
            success=_won(rollout, role, is_alone=len(roles) == 1),
            final_reward=paid.get(role, rollout.final_reward),
            num_turns=list(rollout.roles).count(role),
            failed=rollout.failed,
        )
        for role in roles
        if role in paid or not paid
    ]


def by_role(rollouts: Iterable[RolloutOutcome]) -> dict[Hashable, list[tuple[int, SeatOutcome]]]:
    """The outcomes of each role, each with the index of its rollout."""
    found: dict[Hashable, list[tuple[int, SeatOutcome]]] = {}
    for index, rollout in enumerate(rollouts):
        for one in seat_outcomes(rollout):
            found.setdefault(one.role, []).append((index, one))
    return found


def by_label(labels: Iterable[str]) -> dict[str, list[int]]:
    """The indices at which each label stands, sorted by label.

    >>> by_label(["maze", "guess", "maze"])
    {'guess': [1], 'maze': [0, 2]}
    """
    found: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        found.setdefault(label, []).append(index)
    return dict(sorted(found.items()))


def _won(rollout: RolloutOutcome, role: Hashable, *, is_alone: bool) -> bool | None:
    paid = rollout.final_rewards
    others = [amount for other, amount in paid.items() if other != role]
    if (is_alone and rollout.success is not None) or all(amount == paid[role] for amount in others):
        return rollout.success
    return paid[role] > max(others)
