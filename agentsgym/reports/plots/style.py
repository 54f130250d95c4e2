"""The common style of all plots, and the functions that save and display them."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so the types of its methods are partly unknown.

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
_ROUNDING = 1e-12  # rounding errors of sums of numbers near 1 are smaller
_LARGEST = 1e100  # largest magnitude that is drawn, since matplotlib computes squares and differences of values

#: One number per token of each trajectory, (T,), in the order of the trajectories.
TokenValues = Sequence[Sequence[float]]


class Picture(Figure):
    """A matplotlib figure that notebooks display with or without ``%matplotlib``."""

    def __init__(self, height_inches: float = 4.5) -> None:
        super().__init__(figsize=(WIDTH_INCHES, height_inches), dpi=_DOTS_PER_INCH, layout="constrained")

    def save(self, path: str | Path) -> None:
        """Save the figure as a PNG, atomically, so that concurrent readers always find a complete image.

        Args:
            path: The PNG file; its folder is created if needed.

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
        """Render the figure for a notebook, displayed at half its pixel size, for high-resolution screens."""
        file = io.BytesIO()
        self.savefig(file, format="png")
        width, height = self.get_size_inches() * _DOTS_PER_INCH / 2
        return file.getvalue(), {"width": int(width), "height": int(height)}


def check_path(path: str | Path) -> Path:
    """Check that a path is that of a PNG, and return it."""
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"plots are saved as PNG: the file name must end in .png, got {str(path)!r}")
    return Path(path)


def save_if_requested(picture: Picture, path: str | Path | None) -> Picture:
    """Save a picture unless the path is None, and return the picture."""
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
    """Set the y limits to [-1, 1] if all values are 0 up to rounding, so that they appear as 0."""
    if largest(values) < _ROUNDING:
        axes.set_ylim(-1, 1)


def draw_legend(axes: Axes, **options: Any) -> None:
    """Draw a legend in the common style."""
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", labelcolor=INK, fontsize=9, **options)


def escape_math(text: str) -> str:
    """Escape a text so that matplotlib does not parse parts of it as math."""
    return text.replace("$", r"\$")


def is_drawable(value: float) -> bool:
    """Whether a number can be drawn: it is finite, and does not make an axis overflow."""
    return math.isfinite(value) and abs(value) <= _LARGEST


def drawable(values: Sequence[float]) -> list[float]:
    """Replace each number that cannot be drawn with 0."""
    return [float(value) if is_drawable(value) else 0.0 for value in values]


def not_drawn(values: Sequence[float]) -> str:
    """Return a note on how many numbers are too large to draw; empty if none are. NaN (unknown) does not count.

    >>> not_drawn([1.0, float("nan")]), not_drawn([float("inf"), 1.0])
    ('', ' (1 too large to draw)')
    """
    count = sum(not is_drawable(value) and not math.isnan(value) for value in values)
    return f" ({count} too large to draw)" if count else ""


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean of numbers, some of which may be infinite; None if there are no numbers."""
    return sum(map(float, values)) / len(values) if len(values) else None


def check_values(name: str, values: TokenValues | None, nums_tokens: Sequence[int]) -> None:
    """Check that there is one value for each token of each rollout."""
    if values is None:
        return
    if len(values) != len(nums_tokens):
        raise ConfigError(
            f"{name} must have one sequence per trajectory, got {len(values)} for {len(nums_tokens)} trajectories"
        )
    for index, (one, num_tokens) in enumerate(zip(values, nums_tokens, strict=True)):
        if len(one) != num_tokens:
            raise ConfigError(f"{name}[{index}] must have one value per token, got {len(one)} for {num_tokens} tokens")
