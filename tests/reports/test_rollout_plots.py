"""What the pictures of rollouts show: the numbers in them, and what they refuse."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from agentsgym.errors import ConfigError
from agentsgym.reports.plots import Picture, by_turn, credit_along, learning_curve, lengths, rollout_group
from agentsgym.types import StopReason, Trajectory, Turn


def rollout(rewards: Sequence[float], task: int = 0, index: int = 0, **changes: Any) -> Trajectory:
    """Two tokens a turn, the first given, the second the agent's, which gets the turn's reward."""
    fields: dict[str, Any] = {
        "token_ids": [*range(2 * len(rewards))],
        "turns": [Turn(start=2 * k + 1, stop=2 * k + 2, reward=reward) for k, reward in enumerate(rewards)],
        "messages": [],
        "logprobs": [value for k in range(len(rewards)) for value in (0.0, -float(k + 1))],
        "per_token_rewards": [value for reward in rewards for value in (0.0, reward)],
        "final_reward": sum(rewards),
        "stop_reason": StopReason.DONE,
        "info": {"success": sum(rewards) > 0},
        "task_index": task,
        "rollout_index": index,
    }
    return Trajectory(**(fields | changes))


ROWS = [rollout([0.0, 1.0]), rollout([1.0], task=1), rollout([0.5, -0.5, 0.25], task=2)]
ADVANTAGES = [[0.0, 2.0, 0.0, -1.0], [0.0, 4.0], [0.0] * 6]


def panels(picture: Picture) -> dict[str, Axes]:
    """The axes that are drawn, by title."""
    return {axes.get_title(loc="left"): axes for axes in picture.axes if axes.get_visible()}


def line(axes: Axes) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in axes.lines[0].get_xydata()]  # pyright: ignore


def bars(axes: Axes) -> dict[float, float]:
    """The heights that are not 0, by place."""
    patches: list[Any] = [patch for container in axes.containers for patch in container]
    found = [(patch.get_x() + patch.get_width() / 2, patch.get_height()) for patch in patches]
    return {round(float(x), 6): float(height) for x, height in found if height}


def test_means_by_turn_are_over_the_rollouts_that_have_this_turn() -> None:
    drawn = panels(by_turn(ROWS, advantages=ADVANTAGES))
    assert [*drawn] == [
        "reward",
        "advantage",
        "agent tokens",
        "-log p of the sampled tokens",
        "rollouts with this turn",
    ]
    assert line(drawn["reward"]) == [(0, 0.5), (1, 0.25), (2, 0.25)]
    assert line(drawn["advantage"]) == [(0, 2.0), (1, -0.5), (2, 0.0)]
    assert line(drawn["-log p of the sampled tokens"]) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert line(drawn["agent tokens"]) == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert bars(drawn["rollouts with this turn"]) == {0.0: 3.0, 1.0: 2.0, 2.0: 1.0}


def test_entropies_take_the_place_of_log_probabilities() -> None:
    entropies = [[0.0, 0.5] * one.num_turns for one in ROWS]
    drawn = panels(by_turn(ROWS, entropies=entropies))
    assert line(drawn["entropy"]) == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert "advantage" not in drawn
    unknown = panels(by_turn([rollout([1.0], logprobs=None), rollout([1.0], task=1, logprobs=[0.0, math.nan])]))
    assert [*unknown] == ["reward", "agent tokens", "rollouts with this turn"]


def test_failed_rollouts_and_late_turns_are_left_out() -> None:
    failed = rollout([9.0, 9.0], task=3, stop_reason=StopReason.FAILED, error="gone")
    long = rollout([1.0] * 80, task=4)
    drawn = panels(by_turn([*ROWS[:1], failed, long]))
    assert line(drawn["reward"])[:2] == [(0, 0.5), (1, 1.0)]
    assert len(line(drawn["reward"])) == 50
    for rows in ([], [failed], [rollout([])]):
        with pytest.raises(ConfigError, match="nothing to plot"):
            by_turn(rows)


def test_lengths_are_counted_by_outcome() -> None:
    picture = lengths([*ROWS, rollout([-1.0], task=5)])
    turns, tokens = picture.axes
    won, lost = (
        [float(patch.get_height()) for patch in container]  # pyright: ignore
        for container in turns.containers
    )
    assert won == [0, 1, 1, 1]  # of 0, 1, 2 and 3 turns
    assert lost == [0, 1, 0, 0]
    heights: list[Any] = [patch.get_height() for container in tokens.containers for patch in container]
    assert sum(heights) == 4
    legend = turns.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["won", "lost"]
    with pytest.raises(ConfigError, match="no rollouts"):
        lengths([])


def test_credit_lies_on_the_agents_tokens() -> None:
    record = rollout([0.5, -1.0])
    drawn = panels(credit_along(record, advantages=[9.0, 2.0, 9.0, math.nan]))
    assert [*drawn] == ["reward per token", "advantage", "log-probability (sampler)"]
    assert bars(drawn["reward per token"]) == {1.0: 0.5, 3.0: -1.0}
    assert bars(drawn["advantage"]) == {1.0: 2.0}
    assert line(drawn["log-probability (sampler)"]) == [(1.0, -1.0), (3.0, -2.0)]


def test_a_rollout_without_numbers_still_shows_its_turns() -> None:
    picture = credit_along(rollout([1.0], logprobs=None, per_token_rewards=[]), title="costs $x$")
    assert len(picture.axes) == 1
    assert picture._repr_png_()[0].startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="was recorded without a tokenizer"):
        credit_along(rollout([]))


def test_a_group_is_drawn_rollout_by_rollout() -> None:
    group = [rollout([0.0, 1.0], index=0), rollout([-1.0], index=1), rollout([0.5, 0.5], index=2)]
    drawn = panels(rollout_group(group))
    assert [*drawn] == ["0: won, 1", "1: lost, -1", "2: won, 1"]
    assert [bars(axes) for axes in drawn.values()] == [{1.0: 1.0}, {0.0: -1.0}, {0.0: 0.5, 1.0: 0.5}]
    given = rollout_group(group, advantages=[[0.0, 2.0, 0.0, -1.0], [0.0, 4.0], [0.0, 0.0, 0.0, 3.0]])
    assert bars(panels(given)["0: won, 1"]) == {0.8: 1.0, 0.2: 2.0, 1.2: -1.0}
    many = rollout_group([rollout([1.0], index=index) for index in range(20)])
    assert len(panels(many)) == 16
    assert many.get_suptitle() == "Task 0, 16 of 20 rollouts"


def test_what_rounding_leaves_of_zero_is_drawn_as_zero() -> None:
    rounding = [[0.0, 3e-17, 0.0, -5e-17], [0.0, 1e-17]]
    rows = [rollout([0.0, 0.0]), rollout([0.0], index=1)]
    limits = [
        panels(credit_along(rows[0], advantages=rounding[0]))["advantage"].get_ylim(),
        panels(by_turn(rows, advantages=rounding))["advantage"].get_ylim(),
        *(axes.get_ylim() for axes in panels(rollout_group(rows, advantages=rounding)).values()),
    ]
    assert limits == [(-1.0, 1.0)] * 4
    paid = [rollout([0.0, 0.01]), rollout([0.0], index=1)]
    low, high = panels(rollout_group(paid, advantages=rounding))["0: won, 0.01"].get_ylim()
    assert -0.01 < low <= 0
    assert 0.01 < high < 0.02


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="a rollout group must consist of rollouts of one task, got rollouts of tasks 0, 1, 2"
    ):
        rollout_group(ROWS)
    with pytest.raises(ConfigError, match="rollouts of one task, got none"):
        rollout_group([])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0]], "one sequence per trajectory, got 1 for 3 trajectories"),
        ([[1.0]] * 3, r"\[0\] must have one value per token"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: list[list[float]], message: str) -> None:
    with pytest.raises(ConfigError, match=f"advantages.*{message}"):
        by_turn(ROWS, advantages=values)
    with pytest.raises(ConfigError, match=f"entropies.*{message}"):
        by_turn(ROWS, entropies=values)


def test_pictures_are_written_and_shown_at_one_width(tmp_path: Path) -> None:
    pictures = [
        by_turn(ROWS, path=tmp_path / "a" / "turns.png"),
        lengths(ROWS, path=tmp_path / "a" / "lengths.png"),
        credit_along(ROWS[0], path=tmp_path / "a" / "credit.png"),
        rollout_group(ROWS[:1], path=tmp_path / "a" / "group.png"),
        learning_curve([(0.0, 0.5)], tmp_path / "a" / "curve.png"),
    ]
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["credit.png", "curve.png", "group.png", "lengths.png", "turns.png"]
    for picture in pictures:
        data, size = picture._repr_png_()
        assert imread(io.BytesIO(data)).shape[1] == 2 * size["width"] == 1600
    assert np.ptp(imread(tmp_path / "a" / "turns.png")) > 0


@pytest.mark.parametrize("worst", [math.inf, -math.inf, 1e308, 1.7e308])
def test_what_no_axis_holds_is_said_and_not_drawn(worst: float, tmp_path: Path) -> None:
    rows = [rollout([worst, 1.0]), rollout([0.5, -0.5], index=1)]
    advantages = [[0.0, worst, 0.0, 2.0], [0.0, 1.0, 0.0, math.nan]]
    along = panels(credit_along(rows[0], advantages=advantages[0], path=tmp_path / "along.png"))
    assert bars(along["reward per token (1 too large to draw)"]) == {3.0: 1.0}
    assert bars(along["advantage (1 too large to draw)"]) == {3.0: 2.0}
    group = panels(rollout_group(rows, advantages=advantages, path=tmp_path / "group.png"))
    [told] = [title for title in group if title.endswith("(2 too large to draw)")]
    assert bars(group[told]) == {0.8: 1.0, 1.2: 2.0}
    assert bars(group["1: lost, 0"]) == {-0.2: 0.5, 0.2: 1.0, 0.8: -0.5}
    turns = panels(by_turn(rows, advantages=advantages, path=tmp_path / "turns.png"))
    assert line(turns["reward"]) == [(0, 0.5), (1, 0.25)]
    assert line(turns["advantage"]) == [(0, 1.0), (1, 2.0)]


def test_infinities_of_both_signs_in_one_turn_have_no_mean() -> None:
    record = rollout([1.0], token_ids=[0, 1], turns=[Turn(start=0, stop=2, reward=1.0)])
    for values in ([math.inf, -math.inf], [1e308, 1e308], np.array([math.inf, -math.inf])):
        assert "advantage" not in panels(by_turn([record], advantages=[values]))
        rollout_group([record], advantages=[values])._repr_png_()


@pytest.mark.parametrize("name", ["p.foo", "p", "p.pdf", ".", ".png"])
def test_a_picture_is_a_png_and_its_name_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png, got"):
        lengths(ROWS, path=tmp_path / name)
    assert not [*tmp_path.iterdir()]
    lengths(ROWS, path=tmp_path / "P.PNG")
    assert imread(tmp_path / "P.PNG").shape[1] == 1600
