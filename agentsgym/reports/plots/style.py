"""The style of all plots: size, colors and grid, and how they are saved and shown."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so strict checking knows none of its methods.

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from agentsgym.errors import ConfigError
from agentsgym.reports.colors import AXIS, FAINT_INK, INK, LINE, largest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES = 8.0
_DOTS_PER_INCH = 200
_ROUNDING = 1e-12  # error of sums of numbers near 1 that would be 0 in exact arithmetic
_LARGEST = 1e100  # magnitude that is drawn: matplotlib computes squares and differences of values

#: One number per token of each trajectory, (T,), in the order of the trajectories.
TokenValues = Sequence[Sequence[float]]


class Picture(Figure):
    """A matplotlib figure that notebooks display with or without ``%matplotlib``."""

    def __init__(self, height_inches: float = 4.5) -> None:
        super().__init__(figsize=(WIDTH_INCHES, height_inches), dpi=_DOTS_PER_INCH, layout="constrained")

    def save(self, path: str | Path) -> None:
        """Save the figure as a PNG, atomically, so that a concurrent reader sees a complete picture.

        Args:
            path: The PNG; its folder is created if needed.

        Raises:
            ConfigError: The name does not end in ``.png``.
        """
        path = check_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        try:
            self.savefig(partial, format="png")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """Draw it for a notebook, at half its size in pixels, for high-resolution screens."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        width, height = self.get_size_inches() * _DOTS_PER_INCH / 2
        return file.getvalue(), {"width": int(width), "height": int(height)}


def check_path(path: str | Path) -> Path:
    """Validate the path of a picture.

    Raises:
        ConfigError: The name does not end in ``.png``.
    """
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"plots are saved as PNG: the file name must end in .png, got {str(path)!r}")
    return Path(path)


def finished(picture: Picture, path: str | Path | None) -> Picture:
    """Save a picture if a path is given, and return it."""
    if path is not None:
        picture.save(path)
    return picture


def draw_frame(axes: Axes, title: str, x_label: str = "", y_label: str = "", *, size: float = 13) -> None:
    """Set the title, labels, grid and colors of axes."""
    axes.set_title(title, loc="left", color=INK, fontsize=size, fontweight="bold", pad=10 if size > 10 else 6)
    axes.set_xlabel(x_label, color=FAINT_INK, fontsize=9)
    axes.set_ylabel(y_label, color=FAINT_INK, fontsize=9)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(AXIS)
    axes.tick_params(colors=FAINT_INK, length=0, labelsize=9)


def leave_room(axes: Axes, values: Sequence[float]) -> None:
    """Set the scale to [-1, 1] if all values are 0 up to rounding, so that they appear as 0."""
    if largest(values) < _ROUNDING:
        axes.set_ylim(-1, 1)


def draw_legend(axes: Axes, **options: Any) -> None:
    """Draw the legend."""
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK, fontsize=9, **options)


def plain(text: str) -> str:
    """Escape a text so that matplotlib does not parse mathematics in it."""
    return text.replace("$", r"\$")


def is_drawable(value: float) -> bool:
    """Whether a number can be drawn: it is finite, and no axis overflows with it."""
    return math.isfinite(value) and abs(value) <= _LARGEST


def drawable(values: Sequence[float]) -> list[float]:
    """Replace each number that cannot be drawn with 0."""
    return [float(value) if is_drawable(value) else 0.0 for value in values]


def not_drawn(values: Sequence[float]) -> str:
    """Describe how many numbers are too large to draw; empty if none. NaN, an unknown number, does not count.

    >>> not_drawn([1.0, float("nan")]), not_drawn([float("inf"), 1.0])
    ('', ' (1 too large to draw)')
    """
    count = sum(not is_drawable(value) and not math.isnan(value) for value in values)
    return f" ({count} too large to draw)" if count else ""


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean of numbers, which may be infinite; None if there are none."""
    return sum(map(float, values)) / len(values) if len(values) else None


def check_values(name: str, values: TokenValues | None, nums_tokens: Sequence[int]) -> None:
    """Check that there is one value for each token of each rollout.

    Raises:
        ConfigError: The numbers of values and tokens differ.
    """
    if values is None:
        return
    if len(values) != len(nums_tokens):
        raise ConfigError(
            f"{name} must have one sequence per trajectory, got {len(values)} for {len(nums_tokens)} trajectories"
        )
    for index, (one, num_tokens) in enumerate(zip(values, nums_tokens, strict=True)):
        if len(one) != num_tokens:
            raise ConfigError(f"{name}[{index}] must have one value per token, got {len(one)} for {num_tokens} tokens")
