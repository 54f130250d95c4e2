"""Split rollouts of several roles into one part per role, so that a role's credit depends only on its own rewards.

In a multi-agent environment, one rollout contains the turns of all roles. Every estimator therefore receives each role
as a separate rollout (:func:`split_roles`): the role's turns and rewards, and its final reward R. A role is compared
with the same role in the other rollouts of the task. The estimator's entries for the parts are then assigned to the
turns of the unsplit rollouts (:meth:`RoleSplit.merge`). Rollouts of at most one role are not split.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from agentsgym.credit.rewards import RewardComponent, indices_by_key
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.texts import shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoleSplit:
    """A batch of rollouts, split by role.

    Attributes:
        rollouts: The parts, each of one role, in the order of the rollouts and of the roles' first turns, (P,).
        whole: The unsplit batch, (N,).
        places: For each part, the index of its rollout and the indices of its turns there, (P,).
    """

    rollouts: Sequence[ScoredRollout]
    whole: Sequence[ScoredRollout]
    places: Sequence[tuple[int, Sequence[int]]]

    def merge(self, entries: Sequence[Sequence[T]]) -> list[list[T]]:
        """Merge the entries of the parts' turns into entries for the unsplit rollouts.

        Args:
            entries: One entry per turn of each part, (P, K of the part).

        Returns:
            One entry per turn of each rollout, (N, K).
        """
        merged: list[list[Any]] = [[None] * len(one.turn_rewards) for one in self.whole]
        for (i, turns), own in zip(self.places, entries, strict=True):
            for k, entry in zip(turns, own, strict=True):
                merged[i][k] = entry
        return merged

    def included(self, parts: Sequence[ScoredRollout]) -> list[bool]:
        """Whether any part is trained on, for each rollout, (N,).

        Args:
            parts: The parts, some of which filters may have marked as dropped, (P,).
        """
        flags = [False] * len(self.whole)
        for (i, _), part in zip(self.places, parts, strict=True):
            flags[i] |= part.included
        return flags

    def task_groups(self, groups: Collection[int]) -> set[int]:
        """Return the task groups whose role groups are all in ``groups``.

        Args:
            groups: Role groups: values of the parts' ``group``.
        """
        pairs = zip(self.places, self.rollouts, strict=True)
        others = {self.whole[i].group for (i, _), part in pairs if part.group not in groups}
        return {one.group for one in self.whole} - others


def split_roles(
    rollouts: Sequence[ScoredRollout], *, shared_rewards: Literal["refuse", "keep"] = "refuse"
) -> RoleSplit:
    """Split the rollouts of several roles into one part per role.

    A part is a rollout with the turns of its role and the role's final reward. The parts of the same role and task
    group form a group, whose number differs from that of every task group.

    Args:
        rollouts: The batch.
        shared_rewards: What to do with a rollout of several roles whose rewards are not given by role: ``"refuse"``
            raises, and ``"keep"`` leaves it unsplit.

    Returns:
        The parts; rollouts with a single role are their own part.

    Raises:
        ConfigError: A rollout has turns of several roles, and its rewards are not given by role.

    >>> won = {"X": 1, "O": -1}
    >>> game = ScoredRollout(
    ...     turn_rewards=[0, -1, 1], final_reward=1, group=0, state_keys=[None] * 3, roles=[*"XOX"], final_rewards=won
    ... )
    >>> split = split_roles([game])
    >>> [(part.turn_rewards, part.final_reward) for part in split.rollouts]
    [([0, 1], 1), ([-1], -1)]
    >>> split.merge([["a", "c"], ["b"]])
    [['a', 'b', 'c']]
    """
    groups_with_roles = {one.group for one in rollouts if has_several_roles(one)}
    numbers: dict[tuple[int, Hashable], int] = {}
    first = max((one.group for one in rollouts), default=0) + 1
    parts: list[ScoredRollout] = []
    places: list[tuple[int, Sequence[int]]] = []
    for i, one in enumerate(rollouts):
        is_split = one.group in groups_with_roles and (shared_rewards == "refuse" or not _has_shared_rewards(one))
        for role, turns in (indices_by_key(one.roles) if is_split else {}).items():
            group = numbers.setdefault((one.group, role), first + len(numbers))
            parts.append(_part(one, role, turns, group))
            places.append((i, turns))
        if not (is_split and one.roles):
            parts.append(one)
            places.append((i, range(len(one.turn_rewards))))
    return RoleSplit(parts, rollouts, places)


def has_several_roles(rollout: ScoredRollout) -> bool:
    """Whether a rollout has several roles."""
    return len(rollout.final_rewards) > 1 or len(set(rollout.roles)) > 1


def environment_suffix(environment: Hashable) -> str:
    """Return ``" of CLASS"`` for an error message; empty if the environment is unknown."""
    parts = cast("tuple[Hashable, ...]", environment) if isinstance(environment, tuple) else (environment,)
    return f" of {parts[0]}" if parts and parts[0] is not None else ""


def _has_shared_rewards(rollout: ScoredRollout) -> bool:
    """Whether a rollout has several roles and non-zero rewards that are not given by role."""
    has_rewards = any(one.final_reward != 0 or any(one.turn_rewards) for one in (rollout, *rollout.components.values()))
    return rollout.included and has_rewards and not rollout.final_rewards and len(set(rollout.roles)) > 1


def _part(rollout: ScoredRollout, role: Hashable, turns: Sequence[int], group: int) -> ScoredRollout:
    if _has_shared_rewards(rollout):
        roles = " and ".join(shown(one) for one in indices_by_key(rollout.roles))
        raise ConfigError(
            f"a rollout{environment_suffix(rollout.environment)} has turns of the roles {roles}, but its rewards are "
            "not given by role, so every role would be credited with the rewards of the others: return "
            "info['rewards'] = {role: reward} from _step_episode in each step with a reward (the same for all roles "
            "that play together), or set advantage_estimator='reward'"
        )

    def final_reward(one: ScoredRollout | RewardComponent) -> float:
        if one.final_rewards:  # otherwise it has no rewards, or is excluded from all baselines
            return one.final_rewards[role]
        return one.final_reward if len(set(rollout.roles)) == 1 else 0.0

    own = final_reward(rollout)
    components = {
        name: RewardComponent(
            turn_rewards=[one.turn_rewards[k] for k in turns],
            final_reward=(total := final_reward(one)),
            final_rewards={role: total},
        )
        for name, one in rollout.components.items()
    }
    names = ("turn_rewards", "state_keys", "roles", "potentials", "token_counts", "values", "invalid")
    fields: dict[str, Any] = {name: [values[k] for k in turns] for name in names if (values := getattr(rollout, name))}
    fields |= {"group": group, "final_reward": own, "final_rewards": {role: own}, "components": components}
    return replace(rollout, **fields, parents=_parents_among(turns, rollout.parents))


def _parents_among(turns: Sequence[int], parents: Sequence[int | None]) -> list[int | None]:
    """Return the place in ``turns`` of the nearest ancestor of each turn that is among them; None without one."""
    places: dict[int | None, int] = {k: place for place, k in enumerate(turns)}
    found: list[int | None] = []
    for k in turns if parents else ():
        ancestor = parents[k]
        while ancestor is not None and ancestor not in places:
            ancestor = parents[ancestor]
        found.append(places.get(ancestor))
    return found
