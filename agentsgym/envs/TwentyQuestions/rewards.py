"""Reward a turn, according to ``reward_scheme``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a turn.

    Attributes:
        right: Whether it was the right guess.
        information: The fraction of the game's information gained, in [0, 1].
        penalty: The amount to subtract, at least 0.
    """

    right: bool = False
    information: float = 0.0
    penalty: float = 0.0


def information_fraction(before: int, after: int, at_start: int) -> float:
    """Measure the information gained by ruling out objects, ``log2(n_k / n_{k+1}) / log2(n_0)``.

    ``n_k`` counts the objects that fit all answers before turn k; the sum over a game that leaves one object is 1.

    >>> information_fraction(16, 4, 16)
    0.5
    """
    return math.log2(before / after) / math.log2(at_start) if at_start > 1 else 0.0


def win(outcome: Outcome) -> float:
    """1 for the right guess."""
    return float(outcome.right) - outcome.penalty


def lmrl(outcome: Outcome) -> float:
    """−1 for every turn that is not the right guess (LMRL-Gym, arXiv:2311.18232)."""
    return (0.0 if outcome.right else -1.0) - outcome.penalty


def win_plus_information(outcome: Outcome) -> float:
    """1 for the right guess, else the fraction of information that the turn gained."""
    return (1.0 if outcome.right else outcome.information) - outcome.penalty


#: The default is the first.
REWARD_SCHEMES: dict[str, Callable[[Outcome], float]] = {
    "win_plus_information": win_plus_information,
    "win": win,
    "lmrl": lmrl,
}
#: The default costs of an invalid action and a repeated question, by scheme.
DEFAULT_PENALTIES: dict[str, tuple[float, float]] = {
    "win_plus_information": (0.1, 0.05),
    "win": (0.0, 0.0),
    "lmrl": (0.0, 0.0),
}
