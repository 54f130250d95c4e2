"""Bind an estimator's options to it, the weight of shaping, and the state that it keeps between batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, cast

from agentsgym.credit._comparison import Scale
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.gae import turn_value_targets
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.seats import has_seats, split_seats
from agentsgym.credit.shaping import shaped
from agentsgym.credit.traits import (
    EstimatorTraits,
    Options,
    Use,
    all_options,
    declaration_of,
    reads_token_rewards,
    traits_of,
)
from agentsgym.errors import ConfigError
from agentsgym.fields import check_number

TurnAdvantage = float | Sequence[float]
"""A number for all tokens of a turn, or one for each of its tokens."""

# Why shaped turn rewards do not reach an estimator that does not use turn rewards, by what it uses instead.
_UNREACHED: Final[Mapping[Use, str]] = {
    "per_token_rewards": "it takes the per-token rewards as the environment gave them",
    "final_reward": "it sees final rewards only",
}


class Estimator(Protocol):
    """The signature of an estimator; further keywords are its options."""

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn."""
        ...


@dataclass(frozen=True, slots=True)
class BoundEstimator:
    """An estimator with its options: :func:`agentsgym.credit.registry.get_estimator` makes and checks it.

    A direct call splits rollouts of several roles, so that the function sees each role as a rollout of its own.

    Attributes:
        function: The estimator itself.
        options: Keywords that it is called with beside ``discount`` and ``scale``.
        state: State that it keeps between batches, or None. A call changes it, so that evaluation should call a copy
            (``copy.deepcopy``).
        potential_weight: The weight of potential-based shaping: the function is called with
            :func:`~agentsgym.credit.shaping.shaped` rollouts. 0 for none.
        traits: What it reads and compares with its options and the shaping; None if it declares nothing.

    Raises:
        ConfigError: ``potential_weight`` is not a finite number, or shaping would not change what the function returns.
    """

    function: Callable[..., Sequence[Sequence[TurnAdvantage]]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    state: EMABaselines | None = None
    potential_weight: float = 0.0
    traits: EstimatorTraits | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("potential_weight", self.potential_weight)
        traits = traits_of(self.function, self.options)
        if self.potential_weight and traits is not None:
            if "turn_rewards" not in traits.uses:
                reasons = (reason for use, reason in _UNREACHED.items() if use in traits.uses)
                raise ConfigError(
                    f"potential_weight would change nothing for the estimator {self.name!r}: "
                    f"{next(reasons, 'it sees no rewards of turns')}"
                )
            traits = replace(traits, uses=traits.uses | {"discount"})
        object.__setattr__(self, "traits", traits)

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn."""
        options = self.options if self.state is None else {**self.options, "state": self.state}
        return self._call(self.function, rollouts, discount, {"scale": scale, **options})

    @property
    def name(self) -> str:
        """Name of the function, or of the class of a callable object."""
        return name_of(self.function)

    def value_targets(
        self, rollouts: Sequence[ScoredRollout], *, discount: float
    ) -> Sequence[Sequence[Sequence[float]]]:
        """Return the targets of a value head; for your own estimator the discounted returns.

        Args:
            rollouts: The batch, not shaped yet, with the values of a value head.
            discount: γ over turns.

        Returns:
            As ``values`` of the rollouts, (K, n_k) each; NaN where the head is not trained.

        Raises:
            ConfigError: The rollouts have no values, or with shaping no potentials.
        """
        declaration = declaration_of(self.function)
        function, options = turn_value_targets, {"gae_lambda": 1.0}
        if declaration is not None and declaration.value_targets is not None:
            function, options = declaration.value_targets, all_options(self.function, self.options)
        return self._call(function, rollouts, discount, options)

    def _call(
        self, function: Callable[..., Any], rollouts: Sequence[ScoredRollout], discount: float, options: Options
    ) -> Sequence[Sequence[Any]]:
        """Call a function with shaped rollouts, each role as a rollout of its own; returns entries of whole rollouts.

        An estimator that uses per-token rewards gets the rollouts as they are.
        """
        is_split = not reads_token_rewards(self.traits) and any(map(has_seats, rollouts))
        split = split_seats(rollouts) if is_split else None
        parts = rollouts if split is None else split.rollouts
        if self.potential_weight:
            parts = shaped(parts, discount=discount, weight=self.potential_weight)
        entries = function(parts, discount=discount, **options)
        return entries if split is None else split.merge(entries)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, also within a ``partial``; of a callable object its class, since a repr may change."""
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return getattr(function, "__name__", type(function).__name__)
