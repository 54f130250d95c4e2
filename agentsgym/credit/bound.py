"""What an estimator looks like, and one with its options and its memory bound to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from agentsgym.credit._comparison import Scale
from agentsgym.credit.memory import MovingBaselines
from agentsgym.credit.scored import ScoredRollout

TurnAdvantage = float | Sequence[float]
"""A number for all tokens of a turn, or one for each of its tokens."""


class Estimator(Protocol):
    """What a function must look like to estimate advantages; it may have further keywords, its options."""

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn."""
        ...


@dataclass(frozen=True, slots=True)
class BoundEstimator:
    """An estimator with its options: :func:`agentsgym.credit.advantages.get_estimator` makes and checks it.

    Attributes:
        function: The estimator itself.
        options: Keywords that it is called with beside ``discount`` and ``scale``.
        memory: What it keeps from one batch to the next, handed to it as ``memory``; None for one that keeps nothing.
            A call changes it, so that a copy (``copy.deepcopy``) is what evaluation should call.
    """

    function: Callable[..., Sequence[Sequence[TurnAdvantage]]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    memory: MovingBaselines | None = None

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn."""
        kept = {} if self.memory is None else {"memory": self.memory}
        return self.function(rollouts, discount=discount, scale=scale, **self.options, **kept)

    @property
    def name(self) -> str:
        """What the function is called, or the class of a callable object."""
        return name_of(self.function)


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called, also within a ``partial``; of a callable object its class, since a repr may change."""
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return getattr(function, "__name__", type(function).__name__)
