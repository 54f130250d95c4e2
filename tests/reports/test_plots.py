"""The learning curve as a file, and what is drawn in it."""

from __future__ import annotations

import io
import struct
import sys
import threading
import zlib
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.removed import REMOVED
from agentsgym.reports import plots
from agentsgym.reports.colors import BLUE, REFERENCES, VERMILION
from agentsgym.reports.plots import learning_curve, moving_average, spread
from agentsgym.statistics.metrics import Estimate

POINTS = [(float(64 * batch), 0.4 + 0.004 * batch) for batch in range(1, 100)]
BEFORE, AFTER = Estimate(mean=0.4, low=0.36, high=0.44), Estimate(mean=0.8, low=0.77, high=0.83)


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def pixels_near(path: Path, color: str, tolerance: float = 0.04) -> int:
    wanted = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return int((np.abs(imread(path)[..., :3] - wanted).max(axis=-1) < tolerance).sum())


@pytest.mark.parametrize(
    ("points", "evaluations"),
    [(POINTS, [(0.0, BEFORE), (6400.0, AFTER)]), (POINTS[:1], []), ([], [(0.0, BEFORE)]), ([], [])],
)
def test_every_stage_of_a_run_gives_a_picture_of_the_promised_size(
    tmp_path: Path, points: list[tuple[float, float]], evaluations: list[tuple[float, Estimate]]
) -> None:
    path = tmp_path / "new folder" / "curve.png"
    learning_curve(points, path, evaluations=evaluations, references={"random": BEFORE, "greedy": AFTER})
    assert size_of(path) == (1600, 900)
    assert [file.name for file in path.parent.iterdir()] == ["curve.png"]


def test_each_part_leaves_its_color_in_the_picture(tmp_path: Path) -> None:
    training, evaluation, reference = BLUE, VERMILION, REFERENCES[1]
    path = tmp_path / "curve.png"
    learning_curve([], path)
    assert [pixels_near(path, color) for color in (training, evaluation, reference)] == [0, 0, 0]
    learning_curve(POINTS, path)
    assert pixels_near(path, training) > 1000
    assert pixels_near(path, evaluation) == 0
    learning_curve([], path, evaluations=[(0.0, BEFORE), (1.0, AFTER)], references={"random": BEFORE, "greedy": AFTER})
    assert pixels_near(path, training) == 0
    assert pixels_near(path, evaluation) > 300
    assert pixels_near(path, reference) > 1000


def test_a_reader_never_sees_half_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    learning_curve(POINTS[:2], path)
    done = threading.Event()
    broken: list[int] = []

    def read() -> None:
        while not done.is_set():
            data = path.read_bytes()
            if not data.endswith(b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))):
                broken.append(len(data))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for batch in range(2, 5):
            learning_curve(POINTS[: batch * 10], path)
    finally:
        done.set()
        reader.join()
    assert not broken


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    learning_curve(POINTS, path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="Unknown symbol"):
        learning_curve(POINTS, path, title=r"$\nonsense$")  # found out only when the file is written
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def test_matplotlibs_settings_are_left_alone(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    learning_curve(POINTS, tmp_path / "curve.png")
    assert dict(mpl.rcParams) == before


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 10))
def test_the_moving_average_never_changes_in_hindsight(values: list[float], window: int) -> None:
    means = moving_average(values, window)
    assert means == [pytest.approx(np.mean(values[max(0, end - window) : end])) for end in range(1, len(values) + 1)]
    assert moving_average(values[:-1], window) == means[:-1]


@given(st.lists(st.floats(0, 1), max_size=6))
def test_labels_are_spread_upwards_and_keep_their_order(heights: list[float]) -> None:
    placed = spread(heights, gap=0.1)
    assert all(now >= was for now, was in zip(placed, heights, strict=True))
    ranked = sorted(placed)
    assert all(above - below >= 0.1 - 1e-9 for below, above in pairwise(ranked))
    assert [was for _, was in sorted(zip(placed, heights, strict=True))] == sorted(heights)


def test_the_picture_is_displayed_at_half_its_size(tmp_path: Path) -> None:
    data, size = learning_curve(POINTS, tmp_path / "curve.png")._repr_png_()
    assert imread(io.BytesIO(data)).shape[1] == 2 * size["width"] == 1600


@pytest.mark.parametrize("name", ["p.foo", "p", "p.pdf", ".", ".png"])
def test_the_picture_is_a_png_and_its_name_ends_with_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png, got"):
        learning_curve(POINTS, tmp_path / name)
    assert not [*tmp_path.iterdir()]
    learning_curve(POINTS, tmp_path / "P.PNG")
    assert size_of(tmp_path / "P.PNG") == (1600, 900)


def test_without_matplotlib_a_plot_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'agentsgym\[plots\]'"):
        learning_curve(POINTS)


@pytest.mark.parametrize("name", ["by_turn", "credit_along", "lengths", "rollout_group"])
def test_plots_that_were_removed_name_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=r"removed in 0\.3\.0: look at stored rollouts with `agentsgym view`, or"):
        exec(f"from agentsgym.reports.plots import {name}")
    with pytest.raises(ImportError) as refused:
        getattr(plots, name)
    assert str(refused.value) == REMOVED[f"plot {name}"]
    assert not hasattr(plots, f"{name}s")
