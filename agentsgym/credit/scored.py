"""A rollout as passed to estimators: numbers and keys, no tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from agentsgym.credit.rewards import check_final_rewards, credited_rewards, token_counts
from agentsgym.types import Trajectory


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

    def __post_init__(self) -> None:
        if len(self.turn_rewards) != len(self.state_keys):
            raise ValueError(
                "each turn needs a reward and a state key, got "
                f"{len(self.turn_rewards)} rewards and {len(self.state_keys)} state keys"
            )
        for name in ("roles", "potentials", "token_counts", "values", "invalid"):
            given = getattr(self, name)
            if given and len(given) != len(self.turn_rewards):
                raise ValueError(
                    f"{name} must be empty or have one entry per turn, got {len(given)} for {len(self.turn_rewards)}"
                )
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
            ConfigError: ``turn_credit`` is unknown.
            ValueError: A role that has turns has no final reward, although another role has one.
        """
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
        )

    @property
    def included(self) -> bool:
        """Whether the rollout is used in baselines and in the loss."""
        return not (self.failed or self.dropped)

    def role(self, k: int) -> Hashable:
        """The agent's role in turn k."""
        return self.roles[k] if self.roles else None
