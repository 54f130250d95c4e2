"""The reward of a turn under each ``reward_scheme``."""

from __future__ import annotations

import math
from collections.abc import Callable


def information_fraction(before: int, after: int, at_start: int) -> float:
    """Return the fraction of information gained by ruling out objects, ``log2(n_k / n_{k+1}) / log2(n_0)``.

    ``n_k`` is the number of objects that are consistent with all answers before turn k. Over a game in which one object
    remains, the fractions add up to 1.

    >>> information_fraction(16, 4, 16)
    0.5
    """
    return math.log2(before / after) / math.log2(at_start) if at_start > 1 else 0.0


#: The reward of a turn before penalties, from whether it was the correct guess and the fraction of information that it
#: gained (0 if it ended the game), by scheme; the first one is the default.
REWARD_SCHEMES: dict[str, Callable[[bool, float], float]] = {
    "win_plus_information": lambda is_correct, information: 1.0 if is_correct else information,
    "win": lambda is_correct, _: float(is_correct),
    "lmrl": lambda is_correct, _: 0.0 if is_correct else -1.0,  # LMRL-Gym, arXiv 2311.18232
}
#: The default penalties of an invalid action and a repeated question, by scheme.
DEFAULT_PENALTIES: dict[str, tuple[float, float]] = {
    "win_plus_information": (0.1, 0.05),
    "win": (0.0, 0.0),
    "lmrl": (0.0, 0.0),
}
