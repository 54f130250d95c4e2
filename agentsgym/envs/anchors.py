"""Mean rewards of random and optimal play: the two ends of the scale of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentsgym.errors import ConfigError
from agentsgym.fields import is_number
from agentsgym.texts import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """The mean final rewards of two players under the same rules and limits.

    Attributes:
        random: Mean reward of a player that chooses each legal action with equal probability.
        optimal: Mean reward of the best possible player; not below ``random``.
        exact: Whether these are the exact means; False for estimates, such as the mean reward of a strong player.

    >>> Anchors(random=0.25, optimal=1.0)
    Anchors(random=0.25, optimal=1.0, exact=True)
    """

    random: float
    optimal: float
    exact: bool = True

    def __post_init__(self) -> None:
        if not (is_number()(self.random) and is_number()(self.optimal)):
            raise ConfigError(f"anchors must be finite numbers, got {shown(self.random)} and {shown(self.optimal)}")
        if self.optimal < self.random and not math.isclose(self.optimal, self.random, abs_tol=1e-9):
            raise ConfigError(f"optimal must be at least random, got {self.optimal!r} and {self.random!r}")
