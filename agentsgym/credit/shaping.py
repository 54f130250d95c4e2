"""Potential-based shaping: paying for progress without changing which policy is best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentsgym.credit._comparison import Scale, check_number
from agentsgym.credit.bound import Estimator, TurnAdvantage, name_of
from agentsgym.credit.memory import MovingBaselines
from agentsgym.credit.outcomes import grpo, rae, reward, rloo
from agentsgym.credit.scored import ScoredRollout
from agentsgym.errors import ConfigError

_UNMOVED: dict[Callable[..., Any], str] = {
    grpo: "it sees final rewards only",
    rloo: "it sees final rewards only",
    rae: "it sees final rewards only",
    reward: "it takes the per-token rewards as the environment gave them",
}


def shaped(rollouts: Sequence[ScoredRollout], *, discount: float, weight: float) -> list[ScoredRollout]:
    """Pay each turn for the change in potential, ``r'_k = r_k + w·(γ·Φ_{k+1} - Φ_k)`` (Ng, Harada & Russell 1999).

    Φ_k is what the game says the state before turn k is worth, and 0 after the last turn, however it ended. The
    returns then become ``G_k - w·Φ_k``: a baseline that depends on the state alone, so that no policy's rank and, for
    an unbiased estimator with the same discount, no gradient changes, only its variance. ``final_reward`` is left
    alone: without discount the sum over a rollout only moves by ``-w·Φ_0``, the same for a whole task group. A later
    episode of the same trial counts as what follows.

    Args:
        rollouts: The batch; those that do not count are returned as they are.
        discount: γ, the estimator's own.
        weight: w.

    Returns:
        The rollouts with other turn rewards.

    Raises:
        ConfigError: The game does not say what a turn's state is worth, or ``weight`` is no finite number.

    >>> rollout = ScoredRollout(
    ...     turn_rewards=[0.0, 1.0], final_reward=1.0, group=0, state_keys=[None] * 2, potentials=[-1.0, -0.25]
    ... )
    >>> shaped([rollout], discount=1.0, weight=1.0)[0].turn_rewards
    [0.75, 1.25]
    """
    check_number("potential_weight", weight)
    return [_shaped(one, discount, weight) if one.counts else one for one in rollouts]


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """An estimator that sees shaped turn rewards; it is one itself, and can be pickled and deep-copied.

    Attributes:
        estimator: Who is given the :func:`shaped` rollouts.
        weight: w, what the potentials are multiplied by.

    Raises:
        ConfigError: Shaping would not change what the estimator gives, or ``weight`` is no finite number.
    """

    estimator: Estimator
    weight: float

    def __post_init__(self) -> None:
        check_number("potential_weight", self.weight)
        if reason := _UNMOVED.get(self.function):
            raise ConfigError(f"potential_weight would change nothing for the estimator {self.name!r}: {reason}")

    def __call__(
        self, rollouts: Sequence[ScoredRollout], /, *, discount: float, scale: Scale
    ) -> Sequence[Sequence[TurnAdvantage]]:
        """Return for each rollout one entry a turn."""
        return self.estimator(shaped(rollouts, discount=discount, weight=self.weight), discount=discount, scale=scale)

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
    def memory(self) -> MovingBaselines | None:
        """What the estimator keeps from one batch to the next."""
        return getattr(self.estimator, "memory", None)


def _shaped(rollout: ScoredRollout, discount: float, weight: float) -> ScoredRollout:
    potentials = [*rollout.potentials] or [None] * len(rollout.turn_rewards)
    known = [potential for potential in potentials if potential is not None]
    if len(known) < len(potentials):
        raise ConfigError(
            "potential-based shaping needs the potential of every turn: the game's `_potential` must return a number, "
            f"got None in {len(potentials) - len(known)} of {len(potentials)} turns"
            f"{_of(rollout.game)}"
        )
    following = [*known, 0.0][1:]
    rewards = [
        paid + weight * (discount * after - before)
        for paid, before, after in zip(rollout.turn_rewards, known, following, strict=True)
    ]
    return replace(rollout, turn_rewards=rewards)


def _of(game: Hashable) -> str:
    """Name a game by its class: of a trainer's (class, number of its configuration) the number says nothing."""
    parts = cast("tuple[Hashable, ...]", game) if isinstance(game, tuple) else (game,)
    return f" of {parts[0]}" if parts and parts[0] is not None else ""
