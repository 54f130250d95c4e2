"""Define the interface between a trainer and the policy in training, besides its calls for actions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentsgym.errors import ConfigError

#: The token budget of a turn where nothing else is set.
DEFAULT_TURN_TOKENS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStart:
    """The start of a generation batch, for the policy.

    Attributes:
        seed_parts: JSON values that seed the batch, equal on all ranks.
        session_ids: This rank's sessions, in the order of their numbers.
        first_session: The number of the first of them among the sessions of all ranks.
        step: Number of finished optimizer steps: equal steps mean equal weights, unless ``weights_changed`` was called.
    """

    seed_parts: Sequence[str | int]
    session_ids: Sequence[str]
    first_session: int
    step: int


class TrainedPolicy(Protocol):
    """The policy in training: an :class:`~agentsgym.agents.base.Agent` that also prepares for each batch.

    The policies on transformers, on sharded weights and on vLLM implement it, and so may a user's agent. A class that
    inherits from it has defaults for ``plays_through_updates`` and :meth:`forget`; any other class needs all five
    members.

    Attributes:
        logprobs_are_of_trained_weights: Whether the log-probabilities of its actions come from the weights and
            computations that are trained, so that they are the old ones of the loss. False for an engine with its own
            weights and kernels.
        plays_through_updates: Whether it samples from its own weights while the policy is trained, so that
            :meth:`prepare` may be called while episodes are running. ``max_staleness`` above 0 requires it.
    """

    logprobs_are_of_trained_weights: bool
    plays_through_updates: bool = False

    @abstractmethod
    def prepare(self, start: BatchStart) -> None:
        """Collective: prepare for a generation batch (draws, weights); every rank calls it, also without sessions."""
        ...

    @abstractmethod
    def weights_changed(self) -> None:
        """Record that weights were loaded or trained outside the counted steps."""
        ...

    def forget(self, session_ids: Sequence[str]) -> None:
        """Drop the state of sessions that are over, while others are still running; does nothing by default."""


class _Unprepared(TrainedPolicy):
    """The preparation of an agent that needs none."""

    logprobs_are_of_trained_weights = True

    def prepare(self, start: BatchStart) -> None:
        """Do nothing."""

    def weights_changed(self) -> None:
        """Do nothing."""


_MEMBERS: Final = (
    "logprobs_are_of_trained_weights",
    "plays_through_updates",
    "prepare",
    "weights_changed",
    "forget",
)


def as_trained_policy(agent: Any) -> TrainedPolicy:
    """Return an agent that is a :class:`TrainedPolicy`, and a stand-in for any other, which needs no preparation.

    Raises:
        ConfigError: The agent has only some members of the interface.
    """
    missing = [name for name in _MEMBERS if not hasattr(agent, name)]
    if {*_MEMBERS} - {*missing} <= {"forget"}:  # any agent may have a method of that name
        return _Unprepared()
    if missing:
        raise ConfigError(
            f"a policy in training needs all of {', '.join(_MEMBERS)}, and {type(agent).__name__} lacks "
            f"{', '.join(missing)}: inherit from agentsgym.agents.trained.TrainedPolicy, which has defaults for "
            "plays_through_updates and forget"
        )
    return agent
