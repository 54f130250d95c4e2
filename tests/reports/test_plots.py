"""The learning curve of a run and of a store: the file, what is drawn in it, and the columns that it reads."""

from __future__ import annotations

import io
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from stored import rollout

from agentsgym import ConfigError, MissingDependencyError, RolloutStore, StopReason, Trajectory, Turn
from agentsgym.removed import REMOVED
from agentsgym.reports import plots
from agentsgym.reports.colors import BLUE, REFERENCES, VERMILION
from agentsgym.reports.plots import curve_of, learning_curve, moving_average, spread
from agentsgym.statistics.metrics import Estimate, summarize
from agentsgym.store.records import StoredRollout

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


def played(task: int, rewards: Sequence[float], **fields: Any) -> Trajectory:
    """Two tokens a turn, the second the agent's."""
    turns = [Turn(start=2 * k + 1, stop=2 * k + 2, reward=reward) for k, reward in enumerate(rewards)]
    values: dict[str, Any] = {
        "turns": turns,
        "info": {"success": sum(rewards) > 0},
        "final_reward": sum(rewards),
        "logprobs": [value for k in range(len(rewards)) for value in (0.0, -k - 0.5)],
        "per_token_rewards": [value for reward in rewards for value in (0.0, reward)],
    }
    return rollout(task, 2 * len(rewards), **(values | fields))


ROWS = [
    played(0, [0.0, 1.0]),
    played(0, [0.5], rollout_index=1),
    played(1, [-1.0, 0.0, 0.25]),
    played(2, [1.0], stop_reason=StopReason.FAILED, error="gone", logprobs=None),
]
ADVANTAGES = [[float(index) for index in range(len(one.token_ids))] for one in ROWS]


def kept(path: Path, rows: Sequence[Trajectory], **columns: Any) -> RolloutStore:
    with RolloutStore.writer(path, **columns) as writer:
        for one in rows:
            writer.add(one)
    return RolloutStore(path)


def trained(path: Path) -> RolloutStore:
    with RolloutStore.writer(path, source="training", generation=1) as writer:
        for one, advantages in zip(ROWS, ADVANTAGES, strict=True):
            writer.add(one, advantages=advantages, group=one.task_index)
    return RolloutStore(path)


def test_only_the_columns_that_are_drawn_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = trained(tmp_path / "store")
    read: set[str] = set()
    table = RolloutStore.table

    def noted(self: RolloutStore, columns: Sequence[str] | None = None) -> Any:
        read.update(columns or ["everything"])
        return table(self, columns)

    monkeypatch.setattr(RolloutStore, "table", noted)
    learning_curve(store)
    assert read
    assert not read & {"everything", "token_ids", "messages", "per_token_rewards", "info", "turns", "advantages"}


def test_a_store_of_training_has_a_learning_curve(tmp_path: Path) -> None:
    won, lost = played(0, [1.0]), played(0, [0.0])
    evaluated = [replace(won, task_index=index, task_data={"seed": index}) for index in range(3)] + [lost]
    with RolloutStore.writer(tmp_path) as writer:

        def add(rows: Sequence[Trajectory], **columns: Any) -> None:
            for one in rows:
                writer.add_record(StoredRollout(trajectory=one, **columns))

        add([lost, won], source="evaluation", agent="random", run="x")
        add(evaluated[2:], source="evaluation", agent="before", run="x", step=0)
        add([won, lost, lost, lost], source="training", generation=1, step=0, run="killed")
        add([lost] * 4, source="training", generation=2, step=2, run="killed")
        add([won, won, lost, lost], source="training", generation=2, step=2, run="resumed")
        add([won, won, won, lost, ROWS[3]], source="training", generation=3, step=4, run="resumed")
        add(evaluated, source="evaluation", agent="after", run="x", step=6)
    curve = curve_of(RolloutStore(tmp_path))
    assert curve.points == [(4, 0.25), (8, 0.5), (13, 0.75)]
    assert [(x, estimate.mean) for x, estimate in curve.evaluations] == [(0, 0.5), (13, 0.75)]
    assert curve.evaluations[1][1] == summarize(evaluated).win_rate
    assert {name: estimate.mean for name, estimate in curve.references.items()} == {"random": 0.5}
    [axes] = learning_curve(RolloutStore(tmp_path)).figure.axes
    assert {text.get_text() for text in axes.texts} == {"random 50%", "50%", "75%"}
    with pytest.raises(ConfigError, match="has no learning curve"):
        learning_curve(kept(tmp_path / "played", ROWS))


def test_of_an_evaluation_that_was_made_again_the_later_one_counts(tmp_path: Path) -> None:
    won, lost = played(0, [1.0]), played(0, [0.0])
    with RolloutStore.writer(tmp_path) as writer:
        for run, one in (("first", lost), ("again", won)):
            for agent, step in (("random", None), ("before", 0), ("policy", 0)):
                writer.add(one, source="evaluation", run=run, agent=agent, step=step)
    curve = curve_of(RolloutStore(tmp_path))
    assert [(x, estimate.mean) for x, estimate in curve.evaluations] == [(0, 1.0), (0, 1.0)]  # by both names
    assert {name: estimate.mean for name, estimate in curve.references.items()} == {"random": 1.0}
