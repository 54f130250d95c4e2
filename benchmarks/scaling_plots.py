"""Plots of the cost model: the parts of a step, the gain from staleness, and the tail of a batch."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so strict checking knows none of its methods.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from benchmarks.scaling_engine import STALENESS, TASKS, Cluster, Step, batches_of, generation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GENERATING, REST, FASTER = "#4c78a8", "#e5ae38", "#54a24b"
WAYS: Final = ("lockstep, one server", "lockstep, by rank", "continuous, by rank")
COLORS: Final = dict(zip(TASKS, ("#4c78a8", "#f58518", "#54a24b"), strict=True))
Found = Mapping[tuple[str, int], Sequence[Step]]


def draw_all(found: Found, folder: Path, *, per_gpu: int, seed: int) -> None:
    """Write the plots.

    Args:
        found: The simulated steps by kind of episode and number of GPUs.
        folder: The folder of the PNGs.
        per_gpu: The number of episodes of a step per GPU.
        seed: Random seed of the episodes.
    """
    draw_steps(found, folder / "scaling_steps.png")
    draw_staleness(found, folder / "scaling_staleness.png")
    draw_tail(folder / "scaling_tail.png", per_gpu=per_gpu, seed=seed)


def draw_steps(found: Found, path: Path) -> None:
    """Draw the duration of a step relative to lock-step through one server, one panel per kind and number of GPUs."""
    sizes = sorted({num_gpus for _, num_gpus in found})
    figure = Figure(figsize=(12.0, 3.2 * len(sizes)), dpi=130, layout="constrained")
    for row, num_gpus in zip(figure.subplots(len(sizes), len(TASKS), squeeze=False), sizes, strict=True):
        for axes, name in zip(row, TASKS, strict=True):
            steps = found[name, num_gpus]
            slowest = steps[0].step_s
            for place, step in enumerate(steps):
                is_divided = step.num_generating is not None
                width = step.step_s / slowest
                first = width if is_divided else step.generate_s / slowest
                axes.barh(place, first, color=FASTER if is_divided else GENERATING, height=0.7)
                axes.barh(place, width - first, left=first, color=REST, height=0.7)
                axes.text(width + 0.01, place, f"{1 / width:.1f}x", va="center", fontsize=8)
            axes.set_yticks(range(len(steps)), [step.way for step in steps] if axes is row[0] else [""] * len(steps))
            axes.invert_yaxis()
            axes.set_xlim(0, 1.15)
            axes.set_title(f"{name}, {num_gpus} GPUs", loc="left", fontsize=10)
            _plain(axes)
    figure.supxlabel(
        "length of a step, lock-step through one server = 1 (blue: generation, yellow: learning, green: both at once)",
        fontsize=9,
    )
    figure.savefig(path, format="png")


def draw_staleness(found: Found, path: Path) -> None:
    """Draw the speed of a run without a barrier by ``max_staleness``, and the staleness of its episodes."""
    sizes = sorted({num_gpus for _, num_gpus in found})
    figure = Figure(figsize=(10.0, 3.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, num_gpus), steps in found.items():
        runs = [step for step in steps if step.way.startswith("no barrier")]
        style = ("-", "--", ":")[sizes.index(num_gpus) % 3]
        label = f"{name}, {num_gpus} GPUs"
        speeds = [steps[0].step_s / step.step_s for step in runs]
        left.plot(STALENESS, speeds, style, color=COLORS[name], marker="o", markersize=4, label=label)
        means = [step.staleness[0] for step in runs if step.staleness is not None]
        right.plot(STALENESS, means, style, color=COLORS[name], marker="o", markersize=4)
    left.set_ylabel("times as fast as lock-step")
    right.set_ylabel("mean staleness of an episode, updates")
    for axes in (left, right):
        axes.set_xlabel("max_staleness")
        axes.set_xticks(STALENESS)
        axes.set_ylim(bottom=0)
        _plain(axes)
    left.legend(fontsize=7, frameon=False)
    figure.savefig(path, format="png")


def draw_tail(path: Path, *, per_gpu: int, seed: int, num_gpus: int = 8) -> None:
    """Draw the fraction of a batch that is not finished over time: the tail that the batch waits for."""
    cluster = Cluster(num_gpus=num_gpus, per_gpu=per_gpu)
    figure = Figure(figsize=(12.0, 3.2), dpi=130, layout="constrained")
    for axes, (name, task) in zip(figure.subplots(1, len(TASKS)), TASKS.items(), strict=True):
        [batch] = batches_of(task, cluster.num_episodes, 1, seed)
        for way, color in zip(WAYS, ("#e45756", "#f58518", GENERATING), strict=True):
            ends = generation(way, task, batch, num_gpus, cluster.engine)
            left = [1 - number / len(ends) for number in range(len(ends) + 1)]
            axes.step([0.0, *ends], left, where="post", color=color, label=way)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("seconds")
        axes.set_ylim(0, 1)
        _plain(axes)
        if name == next(iter(TASKS)):
            axes.set_ylabel("fraction of a batch not finished")
            axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, format="png")


def _plain(axes: Axes) -> None:
    axes.grid(axis="both", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
