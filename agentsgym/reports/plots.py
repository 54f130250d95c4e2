"""The plot of a run's learning curve, for which matplotlib (``agentsgym[plots]``) is imported once it is drawn."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so the types of its methods are partly unknown.

from __future__ import annotations

import io
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NoReturn

from agentsgym.cached_folders import replacing
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.removed import REMOVED
from agentsgym.reports.colors import AXIS, BLUE, FAINT_INK, INK, LINE, PAPER, REFERENCES, VERMILION
from agentsgym.statistics.breakdown import SeatOutcome
from agentsgym.statistics.metrics import Estimate, summarize_outcomes
from agentsgym.store.reader import RolloutStore
from agentsgym.types import StopReason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOTS_PER_INCH: Final = 200
_TRAINING, _EVALUATION = BLUE, VERMILION
_CHUNK: Final = 2048  # rollouts read together
_COLUMNS: Final = (
    *("stop_reason", "success", "final_reward", "num_turns", "source", "step", "agent", "run", "generation"),
    *("env_class_path", "env_config", "task_data", "task_index"),
)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


class Picture:
    """A plot that is saved as a PNG, and that notebooks display with or without ``%matplotlib``.

    Attributes:
        figure: The matplotlib figure, drawn without a display or pyplot's global state.
    """

    def __init__(self) -> None:
        if not can_plot():
            raise MissingDependencyError("matplotlib", "plots")
        from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

        self.figure = Figure(figsize=(8.0, 4.5), dpi=_DOTS_PER_INCH, layout="constrained")

    def save(self, path: str | Path) -> None:
        """Save the figure as a PNG, atomically, so that concurrent readers always find a complete image.

        Args:
            path: The PNG file; its folder is created if needed.

        Raises:
            ConfigError: The name does not end in ``.png``.
        """
        path = check_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            self.figure.savefig(file, format="png")

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """Render the figure for a notebook, displayed at half its pixel size, for high-resolution screens."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png")
        width, height = self.figure.get_size_inches() * _DOTS_PER_INCH / 2
        return file.getvalue(), {"width": int(width), "height": int(height)}


def check_path(path: str | Path) -> Path:
    """Check that a path is that of a PNG, and return it."""
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"plots are saved as PNG: the file name must end in .png, got {str(path)!r}")
    return Path(path)


def learning_curve(
    points: Sequence[tuple[float, float]] | RolloutStore,
    path: str | Path | None = None,
    *,
    evaluations: Sequence[tuple[float, Estimate]] = (),
    references: Mapping[str, Estimate] | None = None,
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
        title: The headline.

    Raises:
        ConfigError: The store has neither training rollouts nor evaluations.
        MissingDependencyError: matplotlib is not installed.
    """
    picture = Picture()
    if isinstance(points, RolloutStore):
        stored = curve_of(points)
        points, evaluations = stored.points, [*stored.evaluations, *evaluations]
        references = {**stored.references, **(references or {})}
    axes = picture.figure.add_subplot()
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=10)
    axes.set_xlabel("episodes played in training", color=FAINT_INK, fontsize=9)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(AXIS)
    axes.tick_params(colors=FAINT_INK, length=0, labelsize=9)
    axes.set_ylim(0.0, 1.04)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _draw_references(axes, references or {})
    _draw_training(axes, points)
    _draw_evaluations(axes, evaluations)
    xs = [x for x, _ in points] + [x for x, _ in evaluations]
    span = max(xs, default=1.0) or 1.0
    axes.set_xlim(-0.03 * span, 1.03 * span)
    if points or evaluations:
        axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK, fontsize=9)
    if path is not None:
        picture.save(path)
    return picture


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the means of each value and up to ``window - 1`` values before it.

    >>> moving_average([0.0, 1.0, 1.0, 0.0], window=2)
    [0.0, 0.5, 1.0, 0.5]
    """
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights up, the lowest first, until neighbors are at least ``gap`` apart.

    >>> spread([0.5, 0.1, 0.5], gap=0.25)
    [0.5, 0.1, 0.75]
    """
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for below, above in itertools.pairwise(order):
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
    from matplotlib.patheffects import withStroke  # noqa: PLC0415  # an extra

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveOfStore:
    """The learning curve of a stored training run.

    Attributes:
        points: One pair (number of training rollouts so far, win rate) per generation batch.
        evaluations: One pair (number of training rollouts before it, win rate) per evaluation of the policy.
        references: The win rates of other agents, by name.
    """

    points: list[tuple[float, float]]
    evaluations: list[tuple[float, Estimate]] = field(default_factory=list[tuple[float, Estimate]])
    references: dict[str, Estimate] = field(default_factory=dict[str, Estimate])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A generation batch or an evaluation.

    Attributes:
        run: The name of the run.
        step: The number of optimizer steps before the batch or evaluation.
        tasks: The task of each rollout.
        rollouts: The outcome of each rollout.
    """

    run: str | None
    step: int
    tasks: list[Hashable] = field(default_factory=list[Hashable])
    rollouts: list[SeatOutcome] = field(default_factory=list[SeatOutcome])

    @property
    def win_rate(self) -> float | None:
        """The fraction of rollouts that succeeded; None if it is unknown for all of them."""
        wins = [bool(one.success) for one in self.rollouts if not one.failed]
        is_known = any(one.success is not None for one in self.rollouts)
        return sum(wins) / len(wins) if wins and is_known else None


def curve_of(store: RolloutStore) -> CurveOfStore:
    """Compute the learning curve of a stored training run."""
    generations = store.table(["generation"]).column("generation").drop_null().to_pylist()
    if generations:  # runs of earlier versions were resumed under another name, and begin later
        store.filter(generation=min(generations))
    trained: dict[int, _Batch] = {}
    evaluated: dict[tuple[str, int | None], _Batch] = {}
    chunks = (store[start : start + _CHUNK].table(_COLUMNS) for start in range(0, len(store), _CHUNK))
    for row in itertools.chain.from_iterable(chunk.to_pylist() for chunk in chunks):
        batches: dict[Any, _Batch]
        if row["generation"] is not None:
            batches, key = trained, row["generation"]
        elif row["source"] == "evaluation":
            batches, key = evaluated, (str(row["agent"]), row["step"])
        else:
            continue
        if key not in batches or batches[key].run != row["run"]:  # a resumed run repeats some batches
            batches[key] = _Batch(run=row["run"], step=row["step"] or 0)
        reason = StopReason(row["stop_reason"])
        outcome = SeatOutcome(
            role=None,
            stop_reason=reason,
            success=row["success"],
            final_reward=row["final_reward"],
            num_turns=row["num_turns"],
            failed=reason is StopReason.FAILED,
        )
        task = row["task_index"] if row["task_data"] in {None, "{}"} else row["task_data"]
        batches[key].tasks.append((row["env_class_path"], row["env_config"], task))
        batches[key].rollouts.append(outcome)
    if not trained and not evaluated:
        raise ConfigError(
            f"{store!r} has no learning curve, because it contains neither training rollouts nor evaluations"
        )
    return _curve([trained[generation] for generation in sorted(trained)], evaluated)


def _curve(batches: Sequence[_Batch], evaluated: Mapping[tuple[str, int | None], _Batch]) -> CurveOfStore:
    """Order batches and evaluations by the number of training rollouts so far."""
    counts = [*itertools.accumulate(len(batch.rollouts) for batch in batches)]
    curve = CurveOfStore(points=[])
    for count, batch in zip(counts, batches, strict=True):
        if batch.win_rate is not None:
            curve.points.append((float(count), batch.win_rate))
    for (name, step), evaluation in evaluated.items():
        win_rate = summarize_outcomes(evaluation.rollouts, (), clusters=evaluation.tasks).win_rate
        if win_rate is None:
            continue
        if step is None:  # not an evaluation of the policy in training
            curve.references[name] = win_rate
        else:
            before = [count for count, batch in zip(counts, batches, strict=True) if batch.step < step]
            curve.evaluations.append((float(max(before, default=0)), win_rate))
    curve.evaluations.sort(key=itemgetter(0))
    return curve


def __getattr__(name: str) -> NoReturn:
    if f"plot {name}" in REMOVED:
        raise ImportError(REMOVED[f"plot {name}"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
