"""Reward progress without changing which policy is best (potential-based shaping)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agentsgym.credit._comparison import Scale, check_number
from agentsgym.credit.bound import BoundEstimator, Estimator, TurnAdvantage, name_of
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.scored import ScoredRollout
from agentsgym.credit.seats import each_role_apart, of_environment
from agentsgym.credit.traits import EstimatorTraits, Use, traits_of
from agentsgym.errors import ConfigError

# Why shaped turn rewards do not reach an estimator that does not use turn rewards, by what it uses instead.
_UNREACHED: Final[Mapping[Use, str]] = {
    "per_token_rewards": "it takes the per-token rewards as the environment gave them",
    "final_reward": "it sees final rewards only",
}


def shaped(rollouts: Sequence[ScoredRollout], *, discount: float, weight: float) -> list[ScoredRollout]:
    """Reward each turn for the change in potential, ``r'_k = r_k + w·(γ·Φ_{k+1} - Φ_k)`` (Ng, Harada & Russell 1999).

    Φ_k is what the environment gives for the state before turn k, and 0 after the last turn, however it ended. The
    returns then become ``G_k - w·Φ_k``: a baseline that depends on the state alone, so that no policy's rank and, for
    an unbiased estimator with the same discount, no gradient changes, only its variance. ``final_reward`` is left
    alone: without discount the sum over a rollout only moves by ``-w·Φ_0``, the same for a whole task group. A later
    episode of the same trial counts as what follows.

    Φ is what the state is worth to the role whose turn it is, and what follows a turn is that role's own next turn:
    rollouts of several roles are taken apart (:func:`~agentsgym.credit.seats.each_role_apart`) before they come here.

    Args:
        rollouts: The batch, each of one role; those that are not included are returned as they are.
        discount: γ, the estimator's own.
        weight: w.

    Returns:
        The rollouts with other turn rewards.

    Raises:
        ConfigError: The environment gives no potential for a turn, or ``weight`` is no finite number.

    >>> rollout = ScoredRollout(
    ...     turn_rewards=[0.0, 1.0], final_reward=1.0, group=0, state_keys=[None] * 2, potentials=[-1.0, -0.25]
    ... )
    >>> shaped([rollout], discount=1.0, weight=1.0)[0].turn_rewards
    [0.75, 1.25]
    """
    check_number("potential_weight", weight)
    return [_shaped(one, discount, weight) if one.included else one for one in rollouts]


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """An estimator that sees shaped turn rewards; it is one itself, and can be pickled and deep-copied.

    Attributes:
        estimator: What is called with the :func:`shaped` rollouts.
        weight: w, what the potentials are multiplied by.

    Raises:
        ConfigError: Shaping would not change what the estimator gives, or ``weight`` is no finite number.
    """

    estimator: Estimator
    weight: float

    def __post_init__(self) -> None:
        check_number("potential_weight", self.weight)
        if reason := _why_unreached(self.traits):
            raise ConfigError(f"potential_weight would change nothing for the estimator {self.name!r}: {reason}")

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn."""

        def estimate(parts: Sequence[ScoredRollout]) -> Sequence[Sequence[TurnAdvantage]]:
            seen = shaped(parts, discount=discount, weight=self.weight)
            return self.estimator(seen, discount=discount, scale=scale)

        return each_role_apart(estimate, rollouts)

    @property
    def function(self) -> Callable[..., Any]:
        """The estimator's own function, without options."""
        return getattr(self.estimator, "function", self.estimator)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the estimator."""
        return getattr(self.estimator, "options", {})

    @property
    def name(self) -> str:
        """What the estimator's function is called."""
        return name_of(self.function)

    @property
    def state(self) -> EMABaselines | None:
        """What the estimator keeps from one batch to the next."""
        return getattr(self.estimator, "state", None)

    @property
    def traits(self) -> EstimatorTraits | None:
        """Those of the estimator, and that it uses the discount; None if the estimator declares nothing."""
        traits = traits_of(self.function, self.options)
        return traits and replace(traits, uses=traits.uses | {"discount"})

    def value_targets(
        self, rollouts: Sequence[ScoredRollout], *, discount: float
    ) -> Sequence[Sequence[Sequence[float]]]:
        """Give what a value head is trained towards: the estimator's own targets, of the shaped rewards that it sees.

        Args:
            rollouts: The batch, not shaped yet, with the values of a value head.
            discount: γ over turns.

        Returns:
            As :meth:`BoundEstimator.value_targets`.

        Raises:
            ConfigError: The rollouts have no values or no potentials.
        """
        own = BoundEstimator(self.function, self.options)

        def targets(parts: Sequence[ScoredRollout]) -> Sequence[Sequence[Sequence[float]]]:
            return own.value_targets(shaped(parts, discount=discount, weight=self.weight), discount=discount)

        return each_role_apart(targets, rollouts)


def _why_unreached(traits: EstimatorTraits | None) -> str | None:
    if traits is None or "turn_rewards" in traits.uses:
        return None
    return next((reason for use, reason in _UNREACHED.items() if use in traits.uses), "it sees no rewards of turns")


def _shaped(rollout: ScoredRollout, discount: float, weight: float) -> ScoredRollout:
    potentials = [*rollout.potentials] or [None] * len(rollout.turn_rewards)
    known = [potential for potential in potentials if potential is not None]
    if len(known) < len(potentials):
        raise ConfigError(
            "potential-based shaping needs the potential of every turn: `_potential` must return a number, "
            f"got None in {len(potentials) - len(known)} of {len(potentials)} turns"
            f"{of_environment(rollout.environment)}"
        )
    following = [*known, 0.0][1:]
    rewards = [
        reward + weight * (discount * after - before)
        for reward, before, after in zip(rollout.turn_rewards, known, following, strict=True)
    ]
    return replace(rollout, turn_rewards=rewards)
