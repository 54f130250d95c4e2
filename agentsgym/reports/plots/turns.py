"""Plots of rollouts by turn: reward, advantage, entropy and length."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so the types of its methods are partly unknown.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator

from agentsgym.errors import ConfigError
from agentsgym.reports.colors import BLUE, BROWN, FAINT_INK, GRAY, OUTCOMES, VERMILION, VIOLET
from agentsgym.reports.plots.stored import DrawnRollout, DrawnTurn, lengths_of, turns_of
from agentsgym.reports.plots.style import (
    Picture,
    TokenValues,
    check_values,
    draw_frame,
    draw_legend,
    is_drawable,
    leave_room,
    mean_of,
    save_if_requested,
)
from agentsgym.statistics.intervals import bootstrap_intervals
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from agentsgym.store.reader import RolloutStore

_MAX_TURNS = 50
_NUM_RESAMPLES = 2000
_HATCHES = {"won": "", "lost": "///", "played": "", "failed": "xxx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMeans:
    """Means of a quantity by turn index, over the rollouts that have a turn with this index.

    Attributes:
        turns: The turn indices with known values, (K,).
        means: The means over rollouts, (K,).
        lows: The lower ends of the intervals over tasks, (K,); equal to the mean for a single task.
        highs: The upper ends of the intervals, (K,).
        counts: The numbers of rollouts, (K,).
    """

    turns: list[int]
    means: list[float]
    lows: list[float]
    highs: list[float]
    counts: list[int]


def by_turn(
    trajectories: Sequence[Trajectory] | RolloutStore,
    *,
    advantages: TokenValues | None = None,
    entropies: TokenValues | None = None,
    path: str | Path | None = None,
    title: str = "By turn",
) -> Picture:
    """Plot reward, advantage, entropy and length by turn index, each with its mean and 95% interval over tasks.

    The advantage and entropy of a turn are means over its tokens. Without ``entropies``, the mean of ``-log p`` of the
    sampled tokens, which estimates the sampler's entropy, is drawn instead if it is recorded. Failed rollouts are
    omitted, and only the first 50 turns of a rollout are drawn.

    Args:
        trajectories: The rollouts. For a store, only the plotted columns are read.
        advantages: The advantages, (T,) for each rollout; None for those in the store. If there are none, that panel is
            omitted.
        entropies: The entropies, (T,) for each rollout.
        path: The PNG file to save to, if any; its folder is created if needed.
        title: The headline.

    Raises:
        ConfigError: Every rollout failed or has no turns, or a value is missing.
    """
    rollouts, stored_advantages = turns_of(trajectories, logprobs=entropies is None)
    nums_tokens = [one.num_tokens for one in rollouts]
    check_values("advantages", advantages, nums_tokens)
    check_values("entropies", entropies, nums_tokens)
    advantages = stored_advantages if advantages is None else advantages
    rows = [index for index, one in enumerate(rollouts) if one.turns and one.outcome != "failed"]
    if not rows:
        raise ConfigError("there is nothing to plot: every rollout failed or has no turns")
    panels = [
        (name, color, turn_means(rollouts, rows, value))
        for name, color, value in _panels(rollouts, advantages, entropies)
    ]
    panels = [panel for panel in panels if panel[2].turns]
    num_columns = 3 if len(panels) > 3 else 2
    num_rows = -(-(len(panels) + 1) // num_columns)
    picture = Picture(0.6 + 2.4 * num_rows)
    picture.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid: list[Axes] = list(picture.subplots(num_rows, num_columns, sharex=True, squeeze=False).flat)
    for axes, (name, color, means) in zip(grid, panels, strict=False):
        draw_frame(axes, name, size=10)
        leave_room(axes, [*means.lows, *means.highs])
        axes.fill_between(means.turns, means.lows, means.highs, color=color, alpha=0.18, linewidth=0)
        axes.plot(means.turns, means.means, "o-", color=color, linewidth=1.8, markersize=3.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    draw_frame(grid[len(panels)], "rollouts with this turn", size=10)
    grid[len(panels)].bar(panels[0][2].turns, panels[0][2].counts, color=GRAY, width=0.8)
    grid[len(panels)].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[len(panels) + 1 :]:
        axes.set_visible(False)
    for axes in grid[: len(panels) + 1][-num_columns:]:
        axes.set_xlabel("turn", color=FAINT_INK, fontsize=9)
        axes.tick_params(labelbottom=True)
    return save_if_requested(picture, path)


def lengths(
    trajectories: Sequence[Trajectory] | RolloutStore,
    *,
    path: str | Path | None = None,
    title: str = "Lengths of rollouts",
) -> Picture:
    """Plot histograms of the numbers of turns and tokens of rollouts, by outcome.

    Args:
        trajectories: The rollouts. For a store, only the plotted columns are read.
        path: The PNG file to save to, if any; its folder is created if needed.
        title: The headline.

    Raises:
        ConfigError: There are no rollouts.
    """
    rollouts = lengths_of(trajectories)
    if not rollouts:
        raise ConfigError("there is nothing to plot: there are no rollouts")
    picture = Picture(3.6)
    picture.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    left, right = picture.subplots(1, 2)
    _draw_histogram(left, rollouts, lambda one: one.num_turns, "turns")
    _draw_histogram(right, rollouts, lambda one: one.num_tokens, "tokens, including prompts and observations")
    draw_legend(left, loc="best")
    return save_if_requested(picture, path)


def turn_means(
    rollouts: Sequence[DrawnRollout], rows: Sequence[int], value: Callable[[int, DrawnTurn], float | None]
) -> TurnMeans:
    """Average a quantity by turn index, over those of the rollouts in ``rows`` that have a turn with this index.

    ``value`` returns the quantity for a rollout's index and a turn, or None if it is unknown.
    """
    known: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        for index, turn in enumerate(rollouts[row].turns[:_MAX_TURNS]):
            quantity = value(row, turn)
            if quantity is not None and is_drawable(quantity):
                known.setdefault(index, []).append((rollouts[row].task, quantity))
    means = TurnMeans(turns=[], means=[], lows=[], highs=[], counts=[])
    for index in sorted(known):
        tasks, values = zip(*known[index], strict=True)
        column = np.array(values)[:, None]
        low, high = bootstrap_intervals(column, tasks, num_resamples=_NUM_RESAMPLES)[:, 0]
        means.turns.append(index)
        means.means.append(float(column.mean()))
        means.lows.append(float(low))
        means.highs.append(float(high))
        means.counts.append(len(values))
    return means


def _panels(
    rollouts: Sequence[DrawnRollout], advantages: TokenValues | None, entropies: TokenValues | None
) -> list[tuple[str, str, Callable[[int, DrawnTurn], float | None]]]:
    """Return each quantity's name, color and function, whose arguments are a rollout's index and a turn."""

    def surprise(row: int, turn: DrawnTurn) -> float | None:
        known = rollouts[row].logprobs
        return None if known is None else mean_of([-one for one in known[turn.start : turn.stop]])

    panels: list[tuple[str, str, Callable[[int, DrawnTurn], float | None]]] = [
        ("reward", BLUE, lambda _, turn: turn.reward),
        ("agent tokens", BROWN, lambda _, turn: turn.stop - turn.start),
    ]
    if advantages is not None:
        panels.insert(1, ("advantage", VERMILION, lambda row, turn: mean_of(advantages[row][turn.start : turn.stop])))
    if entropies is not None:
        panels.append(("entropy", VIOLET, lambda row, turn: mean_of(entropies[row][turn.start : turn.stop])))
    else:
        panels.append(("-log p of the sampled tokens", VIOLET, surprise))
    return panels


def _draw_histogram(
    axes: Axes, rollouts: Sequence[DrawnRollout], length: Callable[[DrawnRollout], int], x_label: str
) -> None:
    longest = max(map(length, rollouts))
    step = max(1, -(-(longest + 1) // 30))  # lengths per bar
    edges = np.arange(0, longest + 1 + step, step) - 0.5
    bottom = np.zeros(len(edges) - 1)
    draw_frame(axes, "", x_label, "rollouts")
    for outcome, color in OUTCOMES.items():
        counts, _ = np.histogram([length(one) for one in rollouts if one.outcome == outcome], edges)
        if counts.any():
            axes.bar(
                edges[:-1] + step / 2, counts, width=0.9 * step, bottom=bottom, color=color, label=outcome,
                hatch=_HATCHES[outcome], edgecolor="white", linewidth=0,
            )  # fmt: skip
        bottom += counts
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
