"""What an estimator sees of one rollout: numbers and keys, no tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from agentsgym.credit.rewards import credited_turn_rewards, token_counts
from agentsgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """What an estimator sees of one rollout: numbers and keys, no tokens.

    Attributes:
        turn_rewards: What each turn is paid, after ``turn_credit``, (K,).
        final_reward: R, the reward of the whole rollout, whatever the ``turn_credit``.
        group: Which task group it belongs to, unique over the whole batch.
        state_keys: Equal keys within a task group are the same decision problem, (K,); None where the game does not
            say.
        failed: Whether the environment or the agent broke.
        dropped: Whether a filter left it out: it is in no baseline, and nothing is learnt from it.
        game: Which game was played; baselines that outlive a batch are kept for each game.
        roles: Who the agent was in each turn, (K,); None where the game does not say, empty for None in all turns.
        potentials: What the game says each turn's state is worth, (K,), for potential-based shaping; None where it
            does not say, empty for None in all turns.
        token_counts: How many agent tokens each turn has, (K,); empty where it is not known.
        values: What a value head expects the rest of the rollout to pay, before each token of each turn, (K, n_k);
            empty without a value head.
    """

    turn_rewards: Sequence[float]
    final_reward: float
    group: int
    state_keys: Sequence[Hashable]
    failed: bool = False
    dropped: bool = False
    game: Hashable = None
    roles: Sequence[Hashable] = ()
    potentials: Sequence[float | None] = ()
    token_counts: Sequence[int] = ()
    values: Sequence[Sequence[float]] = ()

    def __post_init__(self) -> None:
        if len(self.turn_rewards) != len(self.state_keys):
            raise ValueError(
                f"each turn needs a reward and a state key, got {len(self.turn_rewards)} and {len(self.state_keys)}"
            )
        for name in ("roles", "potentials", "token_counts", "values"):
            given = getattr(self, name)
            if given and len(given) != len(self.turn_rewards):
                raise ValueError(f"{name} needs one entry a turn or none, got {len(given)} of {len(self.turn_rewards)}")

    @classmethod
    def from_trajectory(
        cls, trajectory: Trajectory, *, group: int, turn_credit: str = "step", game: Hashable = None
    ) -> Self:
        """Take from a trajectory what the estimators need.

        Args:
            trajectory: One rollout.
            group: Which task group it belongs to, unique over the whole batch.
            turn_credit: Which turn is paid, a key of :data:`agentsgym.credit.rewards.TURN_CREDITS`.
            game: Which game was played.

        Raises:
            ConfigError: ``turn_credit`` is unknown.
        """
        counts = token_counts(trajectory)
        return cls(
            turn_rewards=credited_turn_rewards(trajectory.turn_rewards, trajectory.final_reward, counts, turn_credit),
            final_reward=trajectory.final_reward,
            group=group,
            state_keys=[turn.state_key for turn in trajectory.turns],
            failed=trajectory.failed,
            game=game,
            roles=[turn.role for turn in trajectory.turns],
            potentials=[turn.potential for turn in trajectory.turns],
            token_counts=counts,
        )

    @property
    def counts(self) -> bool:
        """Whether it is in baselines and may be learnt from."""
        return not (self.failed or self.dropped)

    def role(self, k: int) -> Hashable:
        """Who the agent was in turn k."""
        return self.roles[k] if self.roles else None
