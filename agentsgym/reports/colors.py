"""Colors of pages and plots, distinguishable with any kind of color vision.

Blue stands for training and positive values, vermilion for evaluation and negative values; no meaning is conveyed only
by color. The tests measure contrast, and color differences as perceived with red, green or blue color blindness.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Final

BLUE: Final = "#0072b2"
VERMILION: Final = "#d55e00"
#: Colors of baselines in a plot, such as random and greedy play.
REFERENCES: Final = ("#6b7280", "#7126ee", "#7a533b", "#b95cff")  # gray, violet, brown, orchid

INK: Final = "#22262b"
FAINT_INK: Final = "#5f6672"
LINE: Final = "#e5e7eb"
AXIS: Final = "#9ca3af"
PAPER: Final = "#ffffff"

#: Colors of pages by theme, as values of the CSS variables ``--NAME``; RGB triples allow transparency.
CSS: Final = {
    "light": {
        "paper": PAPER,
        "ink": INK,
        "faint": FAINT_INK,
        "line": LINE,
        "given": "#eef0f3",
        "agent": "#cdd3dc",
        "positive": "0 114 178",
        "negative": "213 94 0",
    },
    "dark": {
        "paper": "#16181d",
        "ink": "#e5e7eb",
        "faint": "#9ca3af",
        "line": "#3b424d",
        "given": "#23272e",
        "agent": "#4a525f",
        "positive": "86 180 233",
        "negative": "240 138 60",
    },
}


def strength(value: float, limit: float) -> float:
    """Return the signed color intensity of a value, in [-1, 1]: ``value / limit``, but at least a fifth.

    Returns 0, for no color, if the value is 0 or NaN or the limit is 0.

    >>> strength(0.5, 2.0), strength(-9.0, 2.0), strength(1e-9, 2.0), strength(0.0, 2.0)
    (0.25, -1.0, 0.2, 0.0)
    """
    if not value or not limit or value != value:  # noqa: PLR0124  # NaN
        return 0.0
    reach = min(1.0, max(0.2, abs(value) / limit))
    return reach if value > 0 else -reach


def largest(values: Iterable[float]) -> float:
    """Return the largest absolute value of the finite values, the limit of a color scale; 0.0 if there are none."""
    return max((abs(value) for value in values if isfinite(value)), default=0.0)
