"""Whether the colors can be distinguished and read, also by people with a color vision deficiency."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentsgym.reports.colors import BLUE, CSS, INK, PAPER, REFERENCES, VERMILION, strength

SERIES = (BLUE, VERMILION, *REFERENCES)
# Of linear RGB, at full severity: Machado, Oliveira & Fernandes 2009, table 1.
SEEN = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # sRGB, D65


def linear(color: str) -> NDArray[np.float64]:
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)] if color.startswith("#") else list(map(int, color.split()))
    values = np.array(parts) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b*: one unit is about what can just be seen."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    light, dark = sorted((float(TO_XYZ[1] @ linear(color)) for color in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("vision", SEEN)
def test_the_series_can_be_distinguished(vision: str) -> None:
    seen = [lab(SEEN[vision] @ linear(color)) for color in SERIES]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 20
    for theme in CSS.values():
        positive, negative = (lab(SEEN[vision] @ linear(theme[name])) for name in ("positive", "negative"))
        assert float(np.linalg.norm(positive - negative)) > 40


def test_lines_and_texts_stand_out_from_the_paper() -> None:
    assert min(contrast(color, PAPER) for color in SERIES) > 3  # WCAG 2.2, 1.4.11
    assert contrast(INK, PAPER) > 7
    for theme in CSS.values():
        assert min(contrast(theme[name], theme["paper"]) for name in ("ink", "faint")) > 4.5  # WCAG 2.2, 1.4.3
        assert contrast(theme["ink"], theme["given"]) > 4.5
    assert CSS["light"].keys() == CSS["dark"].keys()


@given(st.floats(), st.floats(0, allow_infinity=False))
def test_the_strength_of_a_color_keeps_sign_and_bounds(value: float, limit: float) -> None:
    strong = strength(value, limit)
    assert -1 <= strong <= 1
    assert (strong == 0) == (value == 0 or math.isnan(value) or limit == 0)
    assert strong == 0 or (strong > 0) == (value > 0)
