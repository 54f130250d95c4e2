"""Bind to an estimator its options and the state that it keeps between batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from agentsgym.credit._comparison import Scale
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.gae import return_value_targets
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.seats import each_role_apart
from agentsgym.credit.traits import EstimatorTraits, all_options, declaration_of, reads_token_rewards, traits_of

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
    """An estimator with its options: :func:`agentsgym.credit.registry.get_estimator` makes and checks it.

    Attributes:
        function: The estimator itself.
        options: Keywords that it is called with beside ``discount`` and ``scale``.
        state: What it keeps from one batch to the next; None for one that keeps nothing. A call changes it, so that
            evaluation should call a copy (``copy.deepcopy``).
    """

    function: Callable[..., Sequence[Sequence[TurnAdvantage]]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    state: EMABaselines | None = None

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn; the function sees every role of a rollout as one of its own."""
        kept = {} if self.state is None else {"state": self.state}
        function = partial(self.function, discount=discount, scale=scale, **self.options, **kept)
        return function(rollouts) if reads_token_rewards(self.traits) else each_role_apart(function, rollouts)

    @property
    def name(self) -> str:
        """What the function is called, or the class of a callable object."""
        return name_of(self.function)

    @property
    def traits(self) -> EstimatorTraits | None:
        """What it reads and compares with its options; None if it declares nothing."""
        return traits_of(self.function, self.options)

    def value_targets(
        self, rollouts: Sequence[ScoredRollout], *, discount: float
    ) -> Sequence[Sequence[Sequence[float]]]:
        """Give what a value head is trained towards; for an estimator of one's own the discounted returns.

        Args:
            rollouts: The batch, with the values of a value head.
            discount: γ over turns.

        Returns:
            As ``values`` of the rollouts, (K, n_k) each; NaN where the head is not trained.

        Raises:
            ConfigError: The rollouts have no values.
        """
        declaration = declaration_of(self.function)
        targets = partial(return_value_targets, discount=discount)
        if declaration is not None and declaration.value_targets is not None:
            options = all_options(self.function, self.options)
            targets = partial(declaration.value_targets, discount=discount, **options)
        return each_role_apart(targets, rollouts)


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called, also within a ``partial``; of a callable object its class, since a repr may change."""
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return getattr(function, "__name__", type(function).__name__)
