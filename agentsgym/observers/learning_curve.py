"""Show the win rate during training: as a plot, in a notebook, and next to a progress bar."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from agentsgym.reports.plots import can_plot, check_path, learning_curve

if TYPE_CHECKING:
    from agentsgym.statistics.metrics import Estimate


logger = logging.getLogger(__name__)


def in_notebook() -> bool:
    """Return whether this process runs a notebook, whose displays can be updated, unlike IPython in a terminal.

    IPython is not imported: in a notebook it is loaded already.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@functools.cache
def warn_without_plots() -> None:
    """Log, once in a process, that no learning curve is drawn because matplotlib is not installed."""
    if not can_plot():
        logger.warning(
            "no learning curve is drawn, because matplotlib is not installed: pip install 'agentsgym[plots]', or store "
            "rollouts (store_rollouts=True) and follow the run with `agentsgym view`"
        )


class LearningCurve(TrainerCallback):
    """Plots the win rate of the training rollouts, and shows it next to a progress bar.

    In a notebook, the plot is shown in the running cell and updated in place. If standard error is neither a notebook
    nor a terminal, there is no bar: each log is a line of the logger ``agentsgym.observers.learning_curve`` at level
    INFO. Without matplotlib (``agentsgym[plots]``), nothing is plotted.

    Attributes:
        points: (episodes played so far, win rate of the rollouts since the last log).
        episodes: Episodes played so far.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        before: Estimate | None = None,
        references: Mapping[str, Estimate] | None = None,
        redraw_every_s: float | None = None,
    ) -> None:
        """Set up the plot.

        Args:
            path: PNG file, redrawn during the run; None to write none.
            before: Win rate before training, drawn at 0 episodes.
            references: Win rates of other players by name, drawn as lines.
            redraw_every_s: Seconds between two drawings; None for 30, or 3 in a notebook.

        Raises:
            ConfigError: The path does not end in ``.png``.
        """
        self.points: list[tuple[float, float]] = []
        self.episodes = 0
        self._path = None if path is None else check_path(path)
        if path is not None or in_notebook():
            warn_without_plots()
        self._before = before
        self._references = references or {}
        default = 3.0 if in_notebook() else 30.0  # a drawing takes a third of a second
        self._redraw_every_s = default if redraw_every_s is None else redraw_every_s
        self._display: Any = None  # the handle of the notebook's display
        self._drawn_at = time.monotonic()
        self._begun = (self._drawn_at, 0)  # time and step at which the run began
        self._bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the progress bar."""
        self.episodes = _episodes(args, state)
        self._begun = (time.monotonic(), state.global_step)
        self._bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="reinforcement learning",
            unit="step",
            disable=args.disable_tqdm or not state.is_world_process_zero or not _shows_bars(),
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the progress bar."""
        self.episodes = _episodes(args, state)
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show reward and win rate of the training rollouts since the last log, and add the win rate to the plot."""
        forms = {"reward": "reward {:.3g}", "win_rate": "win rate {:.0%}"}
        shown = [form.format(logs[name]) for name, form in forms.items() if name in (logs or {})]
        if self._bar is not None and shown:
            self._bar.set_postfix_str(", ".join(shown))
            if state.is_world_process_zero and not _shows_bars():
                since, first = self._begun
                pace_s = (time.monotonic() - since) / max(1, state.global_step - first)
                left = timedelta(seconds=round(pace_s * (state.max_steps - state.global_step)))
                progress = f"{state.global_step} of {state.max_steps}, {left} left"
                logger.info("step %s: %s", progress, ", ".join(shown))
        win_rate = (logs or dict[str, Any]()).get("win_rate")
        if win_rate is None:
            return
        self.points.append((self.episodes, win_rate))
        if time.monotonic() - self._drawn_at > self._redraw_every_s:
            self.draw()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the progress bar and draw the plot."""
        self.close()
        self.draw()

    def close(self) -> None:
        """Close the progress bar; also needed after an interrupted run."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def draw(self, after: Estimate | None = None) -> None:
        """Write the plot and show it in a notebook, with the win rate after training once it is known."""
        if (self._path is None and not in_notebook()) or not can_plot():
            return
        evaluations = [(x, e) for x, e in ((0.0, self._before), (self.episodes, after)) if e is not None]
        picture = learning_curve(
            self.points,
            self._path,
            evaluations=evaluations,
            references=self._references,
            title="Win rate during training",
        )
        if self._display is not None:
            self._display.update(picture)
        elif in_notebook():
            self._display = sys.modules["IPython"].display.display(picture, display_id=True)
        self._drawn_at = time.monotonic()


def _shows_bars() -> bool:
    """Return whether progress bars can be shown; lines are logged otherwise."""
    return in_notebook() or sys.stderr.isatty()


def _episodes(args: Any, state: Any) -> int:
    return args.generations_at(state.global_step) * args.generation_batch_size
