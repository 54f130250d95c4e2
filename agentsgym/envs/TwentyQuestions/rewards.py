"""The reward of a turn under each ``reward_scheme``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a turn.

    Attributes:
        correct: Whether the turn was the correct guess.
        information: The fraction of the game's information that the turn gained, in [0, 1]; 0 if it ended the game.
        penalty: The amount to subtract, at least 0.
    """

    correct: bool = False
    information: float = 0.0
    penalty: float = 0.0


def information_fraction(before: int, after: int, at_start: int) -> float:
    """Return the fraction of information gained by ruling out objects, ``log2(n_k / n_{k+1}) / log2(n_0)``.

    ``n_k`` is the number of objects that are consistent with all answers before turn k. Over a game in which one object
    remains, the fractions add up to 1.

    >>> information_fraction(16, 4, 16)
    0.5
    """
    return math.log2(before / after) / math.log2(at_start) if at_start > 1 else 0.0


def win(outcome: Outcome) -> float:
    """Return 1 for the correct guess and 0 otherwise, minus the penalty."""
    return float(outcome.correct) - outcome.penalty


def lmrl(outcome: Outcome) -> float:
    """Return 0 for the correct guess and −1 otherwise, minus the penalty (LMRL-Gym, arXiv 2311.18232)."""
    return (0.0 if outcome.correct else -1.0) - outcome.penalty


def win_plus_information(outcome: Outcome) -> float:
    """Return 1 for the correct guess and the fraction of information gained otherwise, minus the penalty."""
    return (1.0 if outcome.correct else outcome.information) - outcome.penalty


#: The schemes by name; the first one is the default.
REWARD_SCHEMES: dict[str, Callable[[Outcome], float]] = {
    "win_plus_information": win_plus_information,
    "win": win,
    "lmrl": lmrl,
}
#: The default penalties of an invalid action and a repeated question, by scheme.
DEFAULT_PENALTIES: dict[str, tuple[float, float]] = {
    "win_plus_information": (0.1, 0.05),
    "win": (0.0, 0.0),
    "lmrl": (0.0, 0.0),
}
