"""Bind to an estimator its options, the weight of shaping, and its state between batches.

Potential-based shaping rewards progress without changing which policy is best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, cast

from agentsgym.credit._comparison import Scale
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.gae import turn_value_targets
from agentsgym.credit.roles import environment_suffix, has_several_roles, split_roles
from agentsgym.credit.scored import ScoredRollout
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


def shaped(rollouts: Sequence[ScoredRollout], *, discount: float, weight: float) -> list[ScoredRollout]:
    """Reward each turn for the change in potential, ``r'_k = r_k + w·(γ·Φ_{k+1} - Φ_k)`` (Ng, Harada & Russell 1999).

    Φ_k is the environment's potential of the state before turn k, and 0 after the last turn, however the rollout ended.
    The returns then become ``G_k - w·Φ_k``: a baseline that depends only on the state, so the ranking of policies does
    not change. With an unbiased estimator and the same discount, the expected gradient does not change either, only its
    variance. ``final_reward`` is unchanged: without discount, the sum over a rollout changes only by ``-w·Φ_0``, which
    is the same for the entire task group. The next turn may belong to a later episode of the same trial.

    Φ is the value of the state to the role that acts, and the next turn is the next turn of that role: rollouts of
    several roles are split first (:func:`~agentsgym.credit.roles.split_roles`).

    Args:
        rollouts: The batch, each of one role; rollouts that are not included are returned unchanged.
        discount: γ, the discount of the estimator.
        weight: w.

    Returns:
        The rollouts with shaped turn rewards.

    Raises:
        ConfigError: The environment has no potential for a turn, or ``weight`` is not a finite number.

    >>> rollout = ScoredRollout(
    ...     turn_rewards=[0.0, 1.0], final_reward=1.0, group=0, state_keys=[None] * 2, potentials=[-1.0, -0.25]
    ... )
    >>> shaped([rollout], discount=1.0, weight=1.0)[0].turn_rewards
    [0.75, 1.25]
    """
    check_number("potential_weight", weight)
    seen: list[ScoredRollout] = []
    for rollout in rollouts:
        if not rollout.included:
            seen.append(rollout)
            continue
        potentials = [*rollout.potentials] or [None] * len(rollout.turn_rewards)
        known = [potential for potential in potentials if potential is not None]
        if len(known) < len(potentials):
            raise ConfigError(
                "potential-based shaping requires the potential of every turn: `_potential` must return a number, "
                f"got None in {len(potentials) - len(known)} of {len(potentials)} turns"
                f"{environment_suffix(rollout.environment)}"
            )
        rewards = [
            reward + weight * (discount * after - before)
            for reward, before, after in zip(rollout.turn_rewards, known, [*known, 0.0][1:], strict=True)
        ]
        seen.append(replace(rollout, turn_rewards=rewards))
    return seen


TurnAdvantage = float | Sequence[float]
"""One number for all tokens of a turn, or one number per token."""

# Why shaping turn rewards has no effect on an estimator that does not use them, by the input that it uses instead.
_UNREACHED: Final[Mapping[Use, str]] = {
    "per_token_rewards": "it uses the environment's per-token rewards unchanged",
    "final_reward": "it uses only final rewards",
}


class Estimator(Protocol):
    """The signature of an estimator; additional keyword arguments are its options."""

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return one entry per turn of each rollout."""
        ...


@dataclass(frozen=True, slots=True)
class BoundEstimator:
    """An estimator with its options: :func:`agentsgym.credit.registry.get_estimator` makes and checks it.

    A direct call splits rollouts of several roles, so the function receives each role as a separate rollout.

    Attributes:
        function: The estimator itself.
        options: The keyword arguments it is called with, besides ``discount`` and ``scale``.
        state: Its state between batches, or None. A call changes the state, so evaluation should call a copy
            (``copy.deepcopy``).
        potential_weight: The weight of potential-based shaping: the function is called with
            :func:`~agentsgym.credit.bound.shaped` rollouts. 0 for none.
        traits: Its traits with these options and the shaping; None if it declares none.

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
                    f"potential_weight would have no effect on the estimator {self.name!r}: "
                    f"{next(reasons, 'it does not use the rewards of turns')}"
                )
            if "parents" in traits.uses:
                raise ConfigError(
                    f"potential_weight compares the potentials of consecutive turns, but the estimator {self.name!r} "
                    "follows a tree of calls: omit potential_weight, or set follow='turns'"
                )
            traits = replace(traits, uses=traits.uses | {"discount"})
        object.__setattr__(self, "traits", traits)

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return one entry per turn of each rollout.

        Raises:
            ConfigError: ``discount`` is not in [0, 1], or ``scale`` is unknown.
        """
        check_number("discount", discount, 0, 1)
        options = self.options if self.state is None else {**self.options, "state": self.state}
        splits = not reads_token_rewards(self.traits)
        return self._call(self.function, rollouts, discount, {"scale": scale, **options}, splits=splits)

    @property
    def name(self) -> str:
        """Name of the function, or of the class of a callable object."""
        return name_of(self.function)

    def value_targets(
        self, rollouts: Sequence[ScoredRollout], *, discount: float
    ) -> Sequence[Sequence[Sequence[float]]]:
        """Return the targets of a value head; by default, the discounted returns.

        Args:
            rollouts: The batch before shaping, with the values of a value head.
            discount: γ over turns.

        Returns:
            Lists of the same shape as the rollouts' ``values``, (K, n_k) each; NaN where the head is not trained.

        Raises:
            ConfigError: The rollouts have no values, or have no potentials, which shaping requires.
        """
        declaration = declaration_of(self.function)
        function, options = turn_value_targets, {"gae_lambda": 1.0}
        if declaration is not None and declaration.value_targets is not None:
            function, options = declaration.value_targets, all_options(self.function, self.options)
        return self._call(function, rollouts, discount, options)

    def _call(
        self,
        function: Callable[..., Any],
        rollouts: Sequence[ScoredRollout],
        discount: float,
        options: Options,
        *,
        splits: bool = True,
    ) -> Sequence[Sequence[Any]]:
        """Call a function with shaped rollouts, split by role if ``splits``; return entries of the unsplit rollouts."""
        split = split_roles(rollouts) if splits and any(map(has_several_roles, rollouts)) else None
        parts = rollouts if split is None else split.rollouts
        if self.potential_weight:
            parts = shaped(parts, discount=discount, weight=self.potential_weight)
        entries = function(parts, discount=discount, **options)
        return entries if split is None else split.merge(entries)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, even inside a ``partial``; for a callable object, the name of its class."""
    while isinstance(function, partial):
        function = cast("partial[Any]", function).func
    return getattr(function, "__name__", type(function).__name__)
