"""A rollout as passed to estimators: numbers and keys, no tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Self, cast

from agentsgym.credit.rewards import (
    RewardComponent,
    check_final_rewards,
    credited_components,
    credited_rewards,
    token_counts,
)
from agentsgym.errors import ConfigError
from agentsgym.fields import Check, are_numbers, is_bool, is_dict, is_hashable, is_int, is_list, or_none, require
from agentsgym.types import Trajectory

_LARGEST = 1e100  # the squares of larger rewards, which the scales of advantages need, can overflow


def _is_reward(value: Any) -> bool:
    return isinstance(value, Real) and bool(-_LARGEST <= cast("Any", value) <= _LARGEST)


def _all(valid: Check) -> Check:
    return lambda value: is_list(value) and all(map(valid, value))


_REWARDS = f"finite numbers within ±{_LARGEST:g}"
_FIELDS: Mapping[str, tuple[Check, str]] = {
    "turn_rewards": (_all(_is_reward), f"a list of {_REWARDS}"),
    "final_reward": (_is_reward, f"a finite number within ±{_LARGEST:g}"),
    "final_rewards": (lambda value: is_dict(value) and all(map(_is_reward, value.values())), f"a dict of {_REWARDS}"),
    "potentials": (_all(or_none(_is_reward)), f"a list of {_REWARDS}, or None"),
    "group": (lambda value: isinstance(value, Integral), "an int"),
    **dict.fromkeys(("state_keys", "roles"), (_all(is_hashable), "a list of hashable values")),
    "parents": (_all(or_none(is_int(0))), "a list of ints >= 0 or None"),
    "token_counts": (are_numbers, "a list of ints"),
    "values": (_all(are_numbers), "a list of lists of numbers"),
    "invalid": (is_list, "a list of bools"),
    "environment": (is_hashable, "hashable"),
    **dict.fromkeys(("failed", "dropped", "truncated"), (is_bool, "True or False")),
    "components": (
        lambda value: is_dict(value) and all(isinstance(one, RewardComponent) for one in value.values()),
        "a dict of RewardComponents",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """One rollout as passed to estimators: numbers and keys, no tokens.

    Attributes:
        turn_rewards: The reward of each turn's role, after ``turn_credit``, (K,).
        final_reward: R, the reward of the rollout, which does not depend on ``turn_credit``; with several roles, the
            reward of the first role.
        group: Number of the task group, unique over the entire batch.
        state_keys: One key per turn, (K,): turns of a task group with equal keys have the same decision problem. None
            if the environment returns no key. In training a long key is a digest, which can only be compared.
        failed: Whether the environment or the agent raised or took too long.
        dropped: Whether a filter excluded the rollout from baselines and from the loss.
        truncated: Whether a budget, not the environment, ended the episode.
        environment: The environment (in the trainer, its class and configuration), for which estimators keep separate
            baselines across batches.
        roles: The agent's role in each turn, (K,), None without a role; empty if no turn has a role.
        potentials: The potential of each turn's state, (K,), for potential-based shaping, None without a potential;
            empty if no turn has one.
        token_counts: The number of agent tokens of each turn, (K,); empty if unknown.
        values: The return that a value head predicts before each token of each turn, (K, n_k); empty without a value
            head.
        invalid: Whether each turn's action was invalid, (K,); empty if unknown.
        final_rewards: R of each role, if rewards are given by role; otherwise empty.
        components: The components of the rewards, by name; empty if they are plain numbers.
        parents: The index of the earlier turn that each turn follows in a tree of calls, (K,), None for a root; empty
            if no turn has a parent.
    """

    turn_rewards: Sequence[float]
    final_reward: float
    group: int
    state_keys: Sequence[Hashable]
    failed: bool = False
    dropped: bool = False
    truncated: bool = False
    environment: Hashable = None
    roles: Sequence[Hashable] = ()
    potentials: Sequence[float | None] = ()
    token_counts: Sequence[int] = ()
    values: Sequence[Sequence[float]] = ()
    invalid: Sequence[bool] = ()
    final_rewards: Mapping[Hashable, float] = field(default_factory=dict[Hashable, float])
    components: Mapping[str, RewardComponent] = field(default_factory=dict[str, RewardComponent])
    parents: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        for name, (valid, expected) in _FIELDS.items():
            require(name, getattr(self, name), valid, expected)
        num_turns = len(self.turn_rewards)
        if num_turns != len(self.state_keys):
            raise ConfigError(
                "each turn needs a reward and a state key, got "
                f"{num_turns} rewards and {len(self.state_keys)} state keys"
            )
        for name in ("roles", "potentials", "token_counts", "values", "invalid", "parents"):
            given = getattr(self, name)
            if len(given) not in {0, num_turns}:
                raise ConfigError(f"{name} must be empty or have one entry per turn, got {len(given)} for {num_turns}")
        for k, parent in enumerate(self.parents):
            if parent is not None and parent >= k:
                raise ConfigError(f"parents[{k}] must be the index of an earlier turn or None, got {parent}")
        check_final_rewards(self.roles, self.final_rewards)

    @classmethod
    def from_trajectory(
        cls, trajectory: Trajectory, *, group: int, turn_credit: str = "step", environment: Hashable = None
    ) -> Self:
        """Convert a trajectory.

        Args:
            trajectory: One rollout.
            group: Number of the task group, unique over the entire batch.
            turn_credit: Which turns are rewarded, a key of :data:`agentsgym.credit.rewards.TURN_CREDITS`.
            environment: The environment that was played.

        Raises:
            ConfigError: ``turn_credit`` is unknown, a reward is not a number, or a role that has turns has no final
                reward, although another role has one.
        """
        parents = [turn.parent for turn in trajectory.turns]
        return cls(
            turn_rewards=credited_rewards(trajectory, turn_credit),
            final_reward=trajectory.final_reward,
            group=group,
            state_keys=[turn.state_key for turn in trajectory.turns],
            failed=trajectory.failed,
            truncated=trajectory.stop_reason.truncated,
            environment=environment,
            roles=trajectory.roles,
            potentials=[turn.potential for turn in trajectory.turns],
            token_counts=token_counts(trajectory),
            invalid=[turn.invalid for turn in trajectory.turns],
            final_rewards=trajectory.final_rewards,
            components=credited_components(trajectory, turn_credit),
            parents=parents if any(parent is not None for parent in parents) else (),
        )

    @property
    def included(self) -> bool:
        """Whether the rollout is used in baselines and in the loss."""
        return not (self.failed or self.dropped)

    def role(self, k: int) -> Hashable:
        """The agent's role in turn k."""
        return self.roles[k] if self.roles else None
