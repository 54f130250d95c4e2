"""Break rollouts down by role and by environment."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentsgym.credit.components import amounts_of, names_of
from agentsgym.credit.rewards import indices_by_key
from agentsgym.types import StopReason


class RolloutOutcome(Protocol):
    """The attributes of a rollout that an evaluation uses, such as a :class:`~agentsgym.types.Trajectory`."""

    @property
    def stop_reason(self) -> StopReason:
        """The reason why the rollout ended."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the environment or the agent failed."""
        ...

    @property
    def success(self) -> bool | None:
        """Whether the rollout was won; None if unknown."""
        ...

    @property
    def final_reward(self) -> float:
        """The final reward."""
        ...

    @property
    def num_turns(self) -> int:
        """The number of turns."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers in the environment's ``info``."""
        ...

    @property
    def roles(self) -> Sequence[Hashable]:
        """The agent's role in each turn, (K,); empty for None in all turns."""
        ...

    @property
    def final_rewards(self) -> Mapping[Hashable, float]:
        """Each role's final reward; empty if rewards are not given by role."""
        ...

    @property
    def final_components(self) -> Mapping[str, float] | None:
        """The numbers of the final reward by name; None for a plain number."""
        ...

    @property
    def role_components(self) -> Mapping[Hashable, Mapping[str, float]]:
        """The numbers of each role's final reward by name; empty if rewards are not given by role and name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatOutcome:
    """The outcome of one rollout for one of its roles; implements :class:`RolloutOutcome`.

    Attributes:
        role: The role.
        stop_reason: Reason why the rollout ended.
        success: Whether the role won; None if unknown.
        final_reward: Final reward of the role.
        num_turns: Number of the role's turns.
        failed: Whether the environment or the agent failed.
        final_components: The numbers of the final reward by name; None for a plain number.
        final_rewards: Empty, since ``final_reward`` is already that of one role; so are its numbers by name.
        metrics: Empty, since metrics belong to the rollout, not to a role.
    """

    role: Hashable
    stop_reason: StopReason
    success: bool | None
    final_reward: float
    num_turns: int
    failed: bool
    final_components: Mapping[str, float] | None = None
    final_rewards: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float], init=False)
    role_components: Mapping[Hashable, Mapping[str, float]] = field(default_factory=dict[Hashable, Any], init=False)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float], init=False)

    @property
    def roles(self) -> Sequence[Hashable]:
        """The role, as a single entry."""
        return (self.role,)


def seat_outcomes(rollout: RolloutOutcome) -> list[SeatOutcome]:
    """Return the outcome of each role that had a turn in a rollout.

    With a single role, ``info["success"]`` determines the outcome. Among several roles with different rewards, the role
    with the highest reward won, unless it is tied; if all rewards are equal, as in cooperation or after a draw,
    ``info["success"]`` applies to each role.

    Returns:
        One outcome per role, in order of their first turns. Roles with unknown rewards are left out, and so are
        rollouts without named roles.
    """
    roles = dict.fromkeys(role for role in rollout.roles if role is not None)
    rewards = rollout.final_rewards
    if len(roles) > 1 and not rewards and not rollout.failed:
        return []
    outcomes: list[SeatOutcome] = []
    for role in roles:
        if rewards and role not in rewards:
            continue
        others = [amount for other, amount in rewards.items() if other != role]
        is_decided_by_info = len(roles) == 1 and rollout.success is not None
        success = rollout.success
        if not is_decided_by_info and any(amount != rewards[role] for amount in others):
            success = rewards[role] > max(others)
        outcomes.append(
            SeatOutcome(
                role=role,
                stop_reason=rollout.stop_reason,
                success=success,
                final_reward=rewards.get(role, rollout.final_reward),
                num_turns=list(rollout.roles).count(role),
                failed=rollout.failed,
                final_components=rollout.role_components.get(role) if rewards else rollout.final_components,
            )
        )
    return outcomes


def components_by_name(rollouts: Sequence[RolloutOutcome]) -> dict[str, list[float]]:
    """Return the components of the final rewards, one number per rollout, 0.0 where it lacks one.

    Empty without named rewards. Among named rewards, a plain number is the component ``"reward"``.
    """
    rewards = [(one.final_reward, one.final_components) for one in rollouts]
    return {name: amounts_of(name, rewards) for name in names_of(rewards)}


def by_role(rollouts: Iterable[RolloutOutcome]) -> dict[Hashable, list[tuple[int, SeatOutcome]]]:
    """Return the outcomes of each role, each with the index of its rollout."""
    found: dict[Hashable, list[tuple[int, SeatOutcome]]] = {}
    for index, rollout in enumerate(rollouts):
        for one in seat_outcomes(rollout):
            found.setdefault(one.role, []).append((index, one))
    return found


def by_label(labels: Iterable[str]) -> dict[str, list[int]]:
    """Return the indices of each label, sorted by label.

    >>> by_label(["maze", "guess", "maze"])
    {'guess': [1], 'maze': [0, 2]}
    """
    return dict(sorted(indices_by_key(labels).items()))
