"""Define the interface between a trainer and the policy in training, in addition to requests for actions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentsgym.errors import ConfigError

#: The default token budget per turn.
DEFAULT_TURN_TOKENS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStart:
    """The information that a policy receives at the start of a generation batch.

    Attributes:
        seed_parts: JSON values that seed the batch, equal on all ranks.
        session_ids: This rank's sessions, in the order of their numbers.
        first_session: The number of this rank's first session among the sessions of all ranks.
        step: Number of finished optimizer steps: equal steps mean equal weights, unless ``weights_changed`` was called.
    """

    seed_parts: Sequence[str | int]
    session_ids: Sequence[str]
    first_session: int
    step: int


class TrainedPolicy(Protocol):
    """The policy in training: an :class:`~agentsgym.agents.base.Agent` that also prepares for each batch.

    The policies on transformers, on sharded weights and on vLLM implement it, and a user's agent may do so too. Classes
    that inherit from it have defaults for ``samples_during_updates`` and :meth:`forget`; any other class must define
    all five members.

    Attributes:
        logprobs_match_trained_weights: Whether the log-probabilities of its actions are computed from the weights in
            training and in the same way as in training, so that the loss can use them as the old log-probabilities.
            False for an engine with its own weights and kernels.
        samples_during_updates: Whether it samples from its own copy of the weights while the policy is updated, so that
            :meth:`prepare` may be called while episodes are running. ``max_staleness`` above 0 requires it.
    """

    logprobs_match_trained_weights: bool
    samples_during_updates: bool = False

    @abstractmethod
    def prepare(self, start: BatchStart) -> None:
        """Collective: prepare draws and weights for a generation batch; every rank calls it, even without sessions."""
        ...

    @abstractmethod
    def weights_changed(self) -> None:
        """Record that the weights were changed outside the counted optimizer steps."""
        ...

    def forget(self, session_ids: Sequence[str]) -> None:
        """Drop the state of sessions that have ended while others are still running; does nothing by default."""


class _Unprepared(TrainedPolicy):
    """A stand-in for agents that need no preparation."""

    logprobs_match_trained_weights = True

    def prepare(self, start: BatchStart) -> None:
        """Do nothing."""

    def weights_changed(self) -> None:
        """Do nothing."""


_MEMBERS: Final = ("logprobs_match_trained_weights", "samples_during_updates", "prepare", "weights_changed", "forget")


def as_trained_policy(agent: Any) -> TrainedPolicy:
    """Return an agent that is a :class:`TrainedPolicy` unchanged, and a stand-in for any other agent."""
    missing = [name for name in _MEMBERS if not hasattr(agent, name)]
    if {*_MEMBERS} - {*missing} <= {"forget"}:  # any agent may have a method of that name
        return _Unprepared()
    if missing:
        raise ConfigError(
            f"a policy in training must define all of {', '.join(_MEMBERS)}, but {type(agent).__name__} lacks "
            f"{', '.join(missing)}: inherit from agentsgym.agents.trained.TrainedPolicy, which has defaults for "
            "samples_during_updates and forget"
        )
    return agent
