"""Plots of credit assignment: along the tokens of a rollout, and over the rollouts of a task."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves **kwargs untyped, so the types of its methods are partly unknown.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from agentsgym.errors import ConfigError
from agentsgym.reports.colors import BLUE, FAINT_INK, GRAY, INK, LINE, NEGATIVE, OUTCOMES, POSITIVE
from agentsgym.reports.plots.stored import DrawnRollout, turns_of
from agentsgym.reports.plots.style import (
    Picture,
    TokenValues,
    check_values,
    draw_frame,
    drawable,
    escape_math,
    leave_room,
    mean_of,
    not_drawn,
    save_if_requested,
)
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.types import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_ROLLOUTS = 16
_MAX_LABELS = 24  # turn numbers


def credit_along(
    trajectory: Trajectory | StoredRollout,
    *,
    advantages: Sequence[float] | None = None,
    path: str | Path | None = None,
    title: str | None = None,
) -> Picture:
    """Plot a rollout along its tokens: their source, rewards and advantages.

    The agent's turns are shaded and numbered. Positive values are blue and above the line, negative values are
    vermilion and below it.

    Args:
        trajectory: The rollout, with tokens; ``store.record(i)`` includes its advantages.
        advantages: The advantages, (T,); None for the stored ones. If there are none, that panel is omitted.
        path: The PNG file to save to, if any; its folder is created if needed.
        title: The headline; None for the rollout's ``headline``.

    Raises:
        ConfigError: The rollout has no tokens, or the number of advantages is not the number of tokens.
    """
    if isinstance(trajectory, StoredRollout):
        advantages = trajectory.advantages if advantages is None else advantages
        trajectory = trajectory.trajectory
    if not len(trajectory.token_ids):
        raise ConfigError("cannot plot credit: the rollout has no tokens, because it was recorded without a tokenizer")
    check_values("advantages", None if advantages is None else [advantages], [len(trajectory.token_ids)])
    panels = [("reward per token", trajectory.per_token_rewards)] if len(trajectory.per_token_rewards) else []
    panels += [] if advantages is None else [("advantage", advantages)]
    logprobs = trajectory.logprobs
    num_panels = len(panels) + (logprobs is not None)
    picture = Picture(1.3 + 1.7 * max(1, num_panels))
    grid: list[Axes] = list(picture.subplots(max(1, num_panels), 1, sharex=True, squeeze=False).flat)
    for axes, (name, values) in zip(grid, panels, strict=False):
        _draw_signed(axes, trajectory, name, values)
    if logprobs is not None:
        draw_frame(grid[len(panels)], "log-probability (sampler)", size=10)
        positions = np.flatnonzero(np.array(trajectory.agent_token_mask))
        heights = np.asarray(logprobs, dtype=float)[positions]
        grid[len(panels)].plot(positions, heights, ".", color=BLUE, markersize=4, zorder=3)
    if not num_panels:
        draw_frame(grid[0], "", "", "")
        grid[0].set_yticks([])
    _mark_turns(grid, trajectory)
    grid[-1].set_xlabel("token (shaded: agent tokens, by turn)", color=FAINT_INK, fontsize=9)
    grid[-1].set_xlim(-0.5, len(trajectory.token_ids) - 0.5)
    picture.suptitle(escape_math(title or trajectory.headline), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return save_if_requested(picture, path)


def rollout_group(
    trajectories: Sequence[Trajectory] | RolloutStore,
    *,
    advantages: TokenValues | None = None,
    path: str | Path | None = None,
    title: str | None = None,
) -> Picture:
    """Plot the rollouts of a task side by side: the reward of each turn, and its advantage if available.

    Only the first 16 rollouts are drawn; the headline shows if others are omitted.

    Args:
        trajectories: Rollouts of one task, or a store filtered to them, of which only the plotted columns are read.
        advantages: The advantages, (T,) for each rollout; a turn's advantage is the mean over its tokens. None for
            those in the store; if there are none, only rewards are drawn.
        path: The PNG file to save to, if any; its folder is created if needed.
        title: The headline; None for one with the task's index.

    Raises:
        ConfigError: There are no rollouts, they belong to several tasks, or an advantage is missing.
    """
    rollouts, stored_advantages = turns_of(trajectories)
    tasks = sorted({rollout.task for rollout in rollouts})
    if len(tasks) != 1:
        found = (
            f"rollouts of tasks {', '.join(map(str, tasks[:8]))}{', …' if len(tasks) > 8 else ''}" if tasks else "none"
        )
        raise ConfigError(f"a rollout group must consist of rollouts of one task, got {found}")
    check_values("advantages", advantages, [one.num_tokens for one in rollouts])
    advantages = stored_advantages if advantages is None else advantages
    shown = rollouts[:_MAX_ROLLOUTS]
    num_columns = min(4, len(shown))
    num_rows = -(-len(shown) // num_columns)
    picture = Picture(1.0 + 1.7 * num_rows)
    grid: list[Axes] = list(picture.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat)
    heights: list[float] = []
    for index, (axes, rollout) in enumerate(zip(grid, shown, strict=False)):
        heights += _draw_rollout(axes, rollout, None if advantages is None else advantages[index])
    leave_room(grid[0], heights)  # all panels share its scale
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    more = f", {len(shown)} of {len(rollouts)} rollouts" if len(shown) < len(rollouts) else ""
    named = "Rollouts of one task" if isinstance(trajectories, RolloutStore) else f"Task {tasks[0]}"
    headline = escape_math(title or named) + more
    picture.suptitle(headline, x=0.01, ha="left", fontsize=13, fontweight="bold")
    picture.supxlabel("turn", color=FAINT_INK, fontsize=9)
    if advantages is not None:
        keys = [Patch(color=GRAY, label="reward"), Patch(fill=False, edgecolor=INK, hatch="////", label="advantage")]
        picture.legend(handles=keys, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    return save_if_requested(picture, path)


def _draw_signed(axes: Axes, trajectory: Trajectory, name: str, values: Sequence[float]) -> None:
    masked = [value if is_agent else 0.0 for value, is_agent in zip(values, trajectory.agent_token_mask, strict=True)]
    draw_frame(axes, name + not_drawn(masked), size=10)
    heights = np.array(drawable(masked))
    positions = np.arange(len(heights))
    for color, part in ((POSITIVE, heights.clip(min=0)), (NEGATIVE, heights.clip(max=0))):
        axes.bar(positions[part != 0], part[part != 0], width=0.9, color=color, zorder=3)
    axes.axhline(0, color=FAINT_INK, linewidth=0.8, zorder=4)
    axes.margins(y=0.08)
    leave_room(axes, masked)


def _mark_turns(grid: Sequence[Axes], trajectory: Trajectory) -> None:
    """Shade the agent's turns in all panels, and number them above the first panel."""
    for axes in grid:
        for turn in trajectory.turns:
            if turn.stop > turn.start:
                axes.axvspan(turn.start - 0.5, turn.stop - 0.5, color=LINE, alpha=0.6, linewidth=0, zorder=0)
    axes = grid[0]
    title = axes.get_title(loc="left")
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold", pad=16)  # above the numbers
    every = -(-len(trajectory.turns) // _MAX_LABELS)
    for index, turn in enumerate(trajectory.turns):
        if index % every == 0:
            label = f"turn {index}" if index == 0 else str(index)
            axes.annotate(
                label, xy=((turn.start + turn.stop - 1) / 2, 1.0), xycoords=axes.get_xaxis_transform(),
                xytext=(0, 1), textcoords="offset points", ha="center", va="bottom", color=FAINT_INK, fontsize=8,
            )  # fmt: skip


def _draw_rollout(axes: Axes, rollout: DrawnRollout, advantages: Sequence[float] | None) -> list[float]:
    """Draw the rewards and mean advantages of a rollout's turns, and return them."""
    draw_frame(axes, "", "", "")
    rewards = [turn.reward for turn in rollout.turns]
    spans = [] if advantages is None else [advantages[turn.start : turn.stop] for turn in rollout.turns]
    means = [mean_of(span) or 0.0 for span in spans]
    axes.set_title(
        f"{rollout.rollout_index}: {rollout.outcome}, {rollout.final_reward:z.3g}"
        + not_drawn([*rewards, *means]),
        loc="left", color=OUTCOMES[rollout.outcome], fontsize=9, fontweight="bold",
    )  # fmt: skip
    places = np.arange(rollout.num_turns)
    width = 0.8 if advantages is None else 0.4
    axes.bar(places - (0.4 - width / 2), drawable(rewards), width=width, color=GRAY)
    if advantages is not None:
        means = drawable(means)
        colors = [POSITIVE if mean > 0 else NEGATIVE for mean in means]
        axes.bar(places + 0.2, means, width=0.4, color="white", edgecolor=colors, hatch="////", linewidth=0.8)
    axes.axhline(0, color=FAINT_INK, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return [*rewards, *means]
