"""Take rollouts of several roles apart, one part for each role: a role's credit is about what that role was paid.

In a game of several seats one rollout holds the turns of all of them. Every estimator therefore sees each of its roles
as a rollout of its own (:func:`split_seats`): the role's own turns, with the rewards that it was paid, and its own
final reward R. It is compared with the same role of the other rollouts of the task, and its next turn is its own next
turn. What the estimator gives for the parts goes back to the turns that they came from (:meth:`SeatSplit.merge`).
Rollouts of one role, or of none, pass through as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar, cast

from agentsgym.credit.rewards import turns_by_role
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError
from agentsgym.texts import shown

T = TypeVar("T")
Untold = Literal["refuse", "keep"]

_OF_TURNS: Final = ("turn_rewards", "state_keys", "roles", "potentials", "token_counts", "values", "invalid")


@dataclass(frozen=True, slots=True)
class SeatSplit:
    """A batch of rollouts taken apart by role.

    Attributes:
        rollouts: The parts, each of one role, rollout after rollout and in each by the roles' first turns, (P,).
        whole: The batch as it was, (N,).
        places: For each part, the rollout that it comes from, and its turns there, (P,).
    """

    rollouts: Sequence[ScoredRollout]
    whole: Sequence[ScoredRollout]
    places: Sequence[tuple[int, Sequence[int]]]

    def merge(self, entries: Sequence[Sequence[T]]) -> list[list[T]]:
        """Put what there is for each turn of the parts back in the places of these turns.

        Args:
            entries: One entry for each turn of each part, (P, K of the part).

        Returns:
            One entry for each turn of each rollout, (N, K).
        """
        found: list[dict[int, T]] = [{} for _ in self.whole]
        for (i, turns), own in zip(self.places, entries, strict=True):
            found[i].update(zip(turns, own, strict=True))
        return [[own[k] for k in range(len(own))] for own in found]

    def included(self, parts: Sequence[ScoredRollout]) -> list[bool]:
        """Say of each rollout whether any of its parts is trained on, (N,).

        Args:
            parts: The parts, after filters have marked some of them as dropped, (P,).
        """
        flags = [False] * len(self.whole)
        for (i, _), part in zip(self.places, parts, strict=True):
            flags[i] |= part.included
        return flags

    def task_groups(self, groups: Collection[int]) -> set[int]:
        """Find the task groups all of whose parts are in some groups of parts.

        Args:
            groups: The ``group`` of parts.
        """
        pairs = zip(self.places, self.rollouts, strict=True)
        others = {self.whole[i].group for (i, _), part in pairs if part.group not in groups}
        return {one.group for one in self.whole} - others


def split_seats(rollouts: Sequence[ScoredRollout], *, untold: Untold = "refuse") -> SeatSplit:
    """Take the rollouts of several roles apart, one part for each role.

    A part is a rollout of its own: the turns of its role, and the role's final reward. The parts of the same role and
    task group are a group, whose number no task group has.

    Args:
        rollouts: The batch.
        untold: What to do with a rollout of several roles whose game pays and does not say whom: ``"refuse"`` it, or
            ``"keep"`` it whole.

    Returns:
        The parts; the rollouts themselves where there are not several roles.

    Raises:
        ConfigError: A rollout has turns of several roles, and the game does not say what each of them is paid.

    >>> won = {"X": 1, "O": -1}
    >>> game = ScoredRollout(
    ...     turn_rewards=[0, -1, 1], final_reward=1, group=0, state_keys=[None] * 3, roles="XOX", final_rewards=won
    ... )
    >>> split = split_seats([game])
    >>> [(part.turn_rewards, part.final_reward) for part in split.rollouts]
    [([0, 1], 1), ([-1], -1)]
    >>> split.merge([["a", "c"], ["b"]])
    [['a', 'b', 'c']]
    """
    seated = {one.group for one in rollouts if _has_seats(one)}
    numbers: dict[tuple[int, Hashable], int] = {}
    first = max((one.group for one in rollouts), default=0) + 1
    parts: list[ScoredRollout] = []
    places: list[tuple[int, Sequence[int]]] = []
    for i, one in enumerate(rollouts):
        is_split = one.group in seated and (untold == "refuse" or not _is_untold(one))
        for role, turns in (turns_by_role(one.roles) if is_split else {}).items():
            group = numbers.setdefault((one.group, role), first + len(numbers))
            parts.append(_part(one, role, turns, group))
            places.append((i, turns))
        if not (is_split and one.roles):
            parts.append(one)
            places.append((i, range(len(one.turn_rewards))))
    return SeatSplit(parts, rollouts, places)


def each_role_apart(
    function: Callable[[Sequence[ScoredRollout]], Sequence[Sequence[T]]], rollouts: Sequence[ScoredRollout]
) -> Sequence[Sequence[T]]:
    """Call a function that gives an entry for each turn, so that it sees every role as a rollout.

    Args:
        function: What estimates advantages, or targets of a value head.
        rollouts: The batch, or the parts of one, which are not taken apart again.

    Returns:
        One entry for each turn of each rollout, (N, K).

    Raises:
        ConfigError: As :func:`split_seats`.
    """
    if not any(map(_has_seats, rollouts)):
        return function(rollouts)
    split = split_seats(rollouts)
    return split.merge(function(split.rollouts))


def of_environment(environment: Hashable) -> str:
    """Name an environment by its class, without the number of its configuration, which says nothing to a user."""
    parts = cast("tuple[Hashable, ...]", environment) if isinstance(environment, tuple) else (environment,)
    return f" of {parts[0]}" if parts and parts[0] is not None else ""


def _has_seats(rollout: ScoredRollout) -> bool:
    return len(rollout.final_rewards) > 1 or len(set(rollout.roles)) > 1


def _is_untold(rollout: ScoredRollout) -> bool:
    """Whether it is not known who was paid. Where nothing was paid, everybody was paid 0."""
    pays = rollout.final_reward != 0 or any(rollout.turn_rewards)
    return rollout.included and pays and not rollout.final_rewards and len(set(rollout.roles)) > 1


def _part(rollout: ScoredRollout, role: Hashable, turns: Sequence[int], group: int) -> ScoredRollout:
    if _is_untold(rollout):
        roles = " and ".join(shown(one) for one in turns_by_role(rollout.roles))
        raise ConfigError(
            f"a rollout{of_environment(rollout.environment)} has turns of the roles {roles}, but its rewards are not "
            "given by role, so every role would be credited with the rewards of the others: return info['rewards'] = "
            "{role: reward} from _step_episode in each step with a reward (the same for all roles that play "
            "together), or take advantage_estimator='reward'"
        )
    # In a game without a word about a role nobody was paid; one that failed is in no baseline.
    told: Mapping[Hashable, float] = rollout.final_rewards
    own = told[role] if told else rollout.final_reward if len(set(rollout.roles)) == 1 else 0.0
    fields: dict[str, Any] = {
        name: [values[k] for k in turns] for name in _OF_TURNS if (values := getattr(rollout, name))
    }
    return replace(rollout, **fields, group=group, final_reward=own, final_rewards={role: own})
