"""Decide what happens to failed rollouts: how many end a run, whether they are retried, and which groups count."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, cast, get_args

from agentsgym.errors import ConfigError, TooManyFailuresError
from agentsgym.fields import Check, is_fraction, is_int, one_of, or_none, require
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from agentsgym.types import Trajectory

RetrySeed = Literal["same", "new"]
RETRY_SEEDS: tuple[str, ...] = get_args(RetrySeed)
_CHECKS: dict[str, tuple[Check, str]] = {
    "max_failed_fraction": (or_none(is_fraction), "a number in [0, 1] or None"),
    "max_retries": (is_int(0), "a non-negative int"),
    "retry_seed": (one_of(*RETRY_SEEDS), " or ".join(map(repr, RETRY_SEEDS))),
    "min_group_size": (is_int(0), "a non-negative int"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Options for the treatment of failed rollouts, which can be combined freely.

    By default, failed rollouts are recorded, the others continue, and all rollouts are returned.

    >>> FailurePolicy.fail_fast()
    FailurePolicy(max_failed_fraction=0.0, max_retries=0, retry_seed='same', min_group_size=0)
    >>> FailurePolicy.retry(2, min_group_size=3)
    FailurePolicy(max_failed_fraction=None, max_retries=2, retry_seed='same', min_group_size=3)

    Attributes:
        max_failed_fraction: The fraction of all rollouts that may fail, in [0, 1]; as soon as more have failed, the run
            ends with a :class:`~agentsgym.errors.TooManyFailuresError`. With 0 the first failure ends the run; with
            None no number of failures does.
        max_retries: Maximum number of times that a failed rollout is replayed from its start, after all other rollouts
            and under the same session id and index. Only the last attempt is returned, and only it can count as failed.
        retry_seed: ``"same"`` retries from the same start; ``"new"`` uses a seed derived from the first seed and the
            number of the attempt. The start may then differ from that of the rest of the group, so that a baseline
            compares different tasks.
        min_group_size: Task groups with fewer rollouts that did not fail are dropped; 0 drops none.
    """

    max_failed_fraction: float | None = None
    max_retries: int = 0
    retry_seed: RetrySeed = "same"
    min_group_size: int = 0

    def __post_init__(self) -> None:
        for name, (valid, expected) in _CHECKS.items():
            require(f"FailurePolicy.{name}", getattr(self, name), valid, expected)

    @classmethod
    def fail_fast(cls) -> Self:
        """End the run at the first failed rollout, with the error of that rollout."""
        return cls(max_failed_fraction=0.0)

    @classmethod
    def retry(cls, max_retries: int, *, retry_seed: RetrySeed = "same", min_group_size: int = 0) -> Self:
        """Retry failed rollouts; those that still fail are kept, unless their group is dropped as too small."""
        return cls(max_retries=max_retries, retry_seed=retry_seed, min_group_size=min_group_size)

    def seed_of_retry(self, seed: int, attempt: int) -> int:
        """Derive the seed of a retry from the seed of the first attempt; the result is deterministic."""
        return seed if self.retry_seed == "same" else derive_seed("retry", seed, attempt)

    def check_size(self, num_rollouts: int) -> None:
        """Raise :class:`ConfigError` if every task group would be too small."""
        if self.min_group_size > num_rollouts:
            raise ConfigError(
                f"FailurePolicy.min_group_size={self.min_group_size} is larger than num_rollouts={num_rollouts}, so "
                f"every task group would be dropped: set it to at most {num_rollouts}"
            )

    def without_small_groups(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Drop the task groups with fewer than ``min_group_size`` rollouts that did not fail.

        Raises:
            TooManyFailuresError: No group is left.
        """
        if not self.min_group_size:
            return trajectories
        sizes = Counter(trajectory.task_index for trajectory in trajectories if not trajectory.failed)
        kept = [trajectory for trajectory in trajectories if sizes[trajectory.task_index] >= self.min_group_size]
        if trajectories and not kept:
            first = next(trajectory for trajectory in trajectories if trajectory.failed)
            raise TooManyFailuresError(
                f"no task has min_group_size = {self.min_group_size} rollouts that did not fail; the first failure:\n"
                f"{first.error}"
            )
        return kept


def as_policy(given: object) -> FailurePolicy:
    """Return the given policy, or the default for None.

    Raises:
        ConfigError: The value is neither a policy nor None.
    """
    require("failures", given, or_none(lambda value: isinstance(value, FailurePolicy)), "a FailurePolicy or None")
    return cast("FailurePolicy | None", given) or FailurePolicy()


class FailureCount:
    """Counts failed rollouts as they finish, and raises when more have failed than allowed.

    Attributes:
        finished: The finished rollouts, failed ones included.
    """

    def __init__(self, policy: FailurePolicy, num_rollouts: int) -> None:
        """Start counting; ``policy`` sets how many of the ``num_rollouts`` rollouts may fail."""
        self.finished: list[Trajectory] = []
        self._limit = policy.max_failed_fraction
        self._num_rollouts = num_rollouts
        self._num_failed = 0
        self._first: str | None = None

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished rollout.

        Raises:
            TooManyFailuresError: More have failed than allowed; the error's ``trajectories`` are the finished ones.
        """
        self.finished.append(trajectory)
        if trajectory.failed:
            self._num_failed += 1
            self._first = self._first or trajectory.error
            if self._limit is not None and self._num_failed > self._limit * self._num_rollouts:
                error = TooManyFailuresError(
                    f"{self._num_failed} of {self._num_rollouts} rollouts failed, more than max_failed_fraction = "
                    f"{self._limit} allows; the first failure:\n{self._first}"
                )
                error.trajectories = self.finished
                raise error
