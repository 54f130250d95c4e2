"""Measure how long the parts of a generation cycle take, to predict whether the rest fits in a time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator


class CyclePace:
    """Times rollouts, optimizer steps and checkpoints, and expects the next ones to take as long as the last.

    Evaluations and other work between two steps are not part of a cycle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Rollouts run inside steps: seconds of rollouts, and of steps without them, in the last complete cycle.
        self._last: tuple[float, float] | None = None
        self._save_s: float | None = None
        self.forget_cycle()

    def forget_cycle(self) -> None:
        """Discard the measurements of an unfinished cycle."""
        self._rollout_s = self._stepped_s = 0.0
        self._rollouts_since: float | None = None
        self._step_since: float | None = None
        self._checkpoint_started_s: float | None = None

    def step_begins(self, *, is_first: bool) -> None:
        """Record the start of an optimizer step; ``is_first``: whether it is the first of a cycle."""
        if is_first:
            self.forget_cycle()
        self._step_since = self._clock()

    def step_ends(self, *, is_last: bool) -> None:
        """Record the end of an optimizer step; ``is_last``: whether it is the last of a cycle."""
        now = self._clock()
        if self._step_since is not None:
            self._stepped_s += now - self._step_since
        self._step_since, self._checkpoint_started_s = None, now
        if is_last:
            self._last = self._rollout_s, self._stepped_s - self._rollout_s

    def evaluated(self) -> None:
        """Record the end of an evaluation, after which a checkpoint may follow."""
        self._checkpoint_started_s = self._clock()

    def saved(self) -> None:
        """Record that a checkpoint was saved."""
        if self._checkpoint_started_s is not None:
            self._save_s, self._checkpoint_started_s = self._clock() - self._checkpoint_started_s, None

    @contextlib.contextmanager
    def rollouts(self, *, is_training: bool) -> Generator[None]:
        """Time the rollouts that run inside the block; rollouts of an evaluation are not counted."""
        if not is_training:
            yield
            return
        self._rollouts_since = self._clock()
        try:
            yield
        finally:
            self._rollout_s += self._clock() - self._rollouts_since
            self._rollouts_since = None

    def remaining_s(self, *, save_s: float) -> float | None:
        """Predict the seconds for the rest of this cycle and a checkpoint; None before a cycle was measured.

        Args:
            save_s: Expected time of a checkpoint, used until one was measured.
        """
        if self._last is None:
            return None
        now = self._clock()
        rollout_s = self._rollout_s + (0.0 if self._rollouts_since is None else now - self._rollouts_since)
        stepped_s = self._stepped_s + (0.0 if self._step_since is None else now - self._step_since)
        last_rollout_s, update_s = self._last
        rest_s = max(0.0, last_rollout_s - rollout_s) + max(0.0, update_s - (stepped_s - rollout_s))
        return rest_s + (save_s if self._save_s is None else self._save_s)
