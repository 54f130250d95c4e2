"""The plot of a run's learning curve."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so the types of its methods are partly unknown.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from agentsgym.reports.colors import BLUE, PAPER, REFERENCES, VERMILION
from agentsgym.reports.plots.stored import curve_of
from agentsgym.reports.plots.style import Picture, draw_frame, draw_legend, save_if_requested
from agentsgym.statistics.metrics import Estimate
from agentsgym.store.reader import RolloutStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAINING, _EVALUATION = BLUE, VERMILION


def learning_curve(
    points: Sequence[tuple[float, float]] | RolloutStore,
    path: str | Path | None = None,
    *,
    evaluations: Sequence[tuple[float, Estimate]] = (),
    references: Mapping[str, Estimate] | None = None,
    x_label: str = "episodes played in training",
    title: str = "Win rate",
) -> Picture:
    """Plot the win rate in training, its moving average, evaluations with intervals, and levels of other agents.

    Args:
        points: The training curve as pairs (x, win rate in [0, 1]) with x ascending (may be empty), or the store of
            a training run (``store_rollouts``), which supplies a point per generation batch, evaluations and
            references in addition to those that are passed.
        path: The PNG file to save to, if any, of 1600 × 900 pixels, replaced atomically; its folder is created if
            needed.
        evaluations: Pairs (x, estimate), for example of evaluations before and after training.
        references: Other agents' win rates by name, for example of random and greedy play.
        x_label: The label of the x axis.
        title: The headline.

    Raises:
        ConfigError: The store has neither training rollouts nor evaluations.
    """
    if isinstance(points, RolloutStore):
        stored = curve_of(points)
        points, evaluations = stored.points, [*stored.evaluations, *evaluations]
        references = {**stored.references, **(references or {})}
    picture = Picture()
    axes = picture.add_subplot()
    draw_frame(axes, title, x_label)
    axes.set_ylim(0.0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _draw_references(axes, references or {})
    _draw_training(axes, points)
    _draw_evaluations(axes, evaluations)
    xs = [x for x, _ in points] + [x for x, _ in evaluations]
    span = max(xs, default=1.0) or 1.0
    axes.set_xlim(-0.03 * span, 1.03 * span)
    if points or evaluations:
        draw_legend(axes, loc="lower right")
    return save_if_requested(picture, path)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the means of each value and up to ``window - 1`` values before it.

    >>> moving_average([0.0, 1.0, 1.0, 0.0], window=2)
    [0.0, 0.5, 1.0, 0.5]
    """
    means: list[float] = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights up, the lowest first, until neighbors are at least ``gap`` apart.

    >>> spread([0.5, 0.1, 0.5], gap=0.25)
    [0.5, 0.1, 0.75]
    """
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    return placed


def _draw_references(axes: Axes, references: Mapping[str, Estimate]) -> None:
    heights = spread([estimate.mean for estimate in references.values()], gap=0.05)
    for index, (name, estimate) in enumerate(references.items()):
        color = REFERENCES[index % len(REFERENCES)]
        axes.axhspan(estimate.low, estimate.high, color=color, alpha=0.12, linewidth=0)
        axes.axhline(estimate.mean, color=color, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"{name} {estimate.mean:.0%}",
            xy=(1.0, heights[index]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, 0),
            textcoords="offset points",
            color=color,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def _draw_training(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    if not points:
        return
    xs, win_rates = zip(*points, strict=True)
    window = max(1, len(points) // 20)
    label = "training" if window == 1 else f"training, mean of {window} points"
    axes.plot(xs, win_rates, ".", color=_TRAINING, alpha=0.3, markersize=4, markeredgewidth=0)
    axes.plot(xs, moving_average(win_rates, window), color=_TRAINING, linewidth=2, label=label)


def _draw_evaluations(axes: Axes, evaluations: Sequence[tuple[float, Estimate]]) -> None:
    if not evaluations:
        return
    xs = [x for x, _ in evaluations]
    means = [estimate.mean for _, estimate in evaluations]
    errors = [[e.mean - e.low for _, e in evaluations], [e.high - e.mean for _, e in evaluations]]
    axes.errorbar(
        xs, means, yerr=errors, fmt="o", color=_EVALUATION, markersize=6, capsize=4, linewidth=1.6, zorder=5,
        label="evaluation, with interval",
    )  # fmt: skip
    for x, estimate in evaluations:
        is_below = estimate.low > 0.1  # otherwise the label would overlap the axis
        axes.annotate(
            f"{estimate.mean:.0%}",
            xy=(x, estimate.low if is_below else estimate.high),
            xytext=(0, -6 if is_below else 6),
            textcoords="offset points",
            ha="center",
            va="top" if is_below else "bottom",
            color=_EVALUATION,
            fontsize=10,
            fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground=PAPER)],
            zorder=6,
        )
