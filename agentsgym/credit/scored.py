"""A rollout as estimators see it: numbers and keys, no tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from agentsgym.credit.rewards import check_final_rewards, credited_rewards, token_counts
from agentsgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """One rollout as estimators see it: numbers and keys, no tokens.

    Attributes:
        turn_rewards: The reward of each turn's role, after ``turn_credit``, (K,).
        final_reward: R, the reward of the whole rollout, whatever the ``turn_credit``; with several roles that of the
            first.
        group: Which task group it belongs to, unique over the whole batch.
        state_keys: Equal keys within a task group are the same decision problem, (K,); None where the
            environment returns no key. In training a long key is a digest: keys can be compared, not read.
        failed: Whether the environment or the agent raised, or took too long.
        dropped: Whether a filter left it out: it is in no baseline and not in the loss.
        truncated: Whether a budget, not the environment, ended the episode.
        environment: The environment that was played (in the trainer its class and configuration); baselines that
            outlive a batch are kept for each.
        roles: The agent's role in each turn, (K,); None where the environment has none, empty for None in all turns.
        potentials: The potential of each turn's state, (K,), for potential-based shaping; None where the environment
            has none, empty for None in all turns.
        token_counts: How many agent tokens each turn has, (K,); empty if unknown.
        values: The return that a value head predicts before each token of each turn, (K, n_k); empty without a value
            head.
        invalid: Whether each turn's action was invalid, (K,); empty if unknown.
        final_rewards: R of each role, where rewards are given by role; else empty.
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
                f"each turn needs a reward and a state key, got {len(self.turn_rewards)} and {len(self.state_keys)}"
            )
        for name in ("roles", "potentials", "token_counts", "values", "invalid"):
            given = getattr(self, name)
            if given and len(given) != len(self.turn_rewards):
                raise ValueError(
                    f"{name} needs one entry per turn or none, got {len(given)} of {len(self.turn_rewards)}"
                )
        check_final_rewards(self.roles, self.final_rewards)

    @classmethod
    def from_trajectory(
        cls, trajectory: Trajectory, *, group: int, turn_credit: str = "step", environment: Hashable = None
    ) -> Self:
        """Score a trajectory.

        Args:
            trajectory: One rollout.
            group: Its task group, unique over the whole batch.
            turn_credit: Which turn is rewarded, a key of :data:`agentsgym.credit.rewards.TURN_CREDITS`.
            environment: The environment that was played.

        Raises:
            ConfigError: ``turn_credit`` is unknown.
            ValueError: A role has turns and no final reward, and another has one.
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
        """Whether it is in baselines and in the loss."""
        return not (self.failed or self.dropped)

    def role(self, k: int) -> Hashable:
        """The agent's role in turn k."""
        return self.roles[k] if self.roles else None
