"""The metrics that a run logs: their names, groups and meanings."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final

from agentsgym.training.metrics.listed import LISTED
from agentsgym.training.settings import GROUPS

__all__ = ["GROUPS", "METRICS", "Metric", "metric_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: The key in the log. ``turn_00`` stands for the index of any turn, ``…`` for a role or an environment.
        section: The heading of the metric's table in ``docs/metrics.md``, for what is measured.
        group: A key of :data:`GROUPS`.
        meaning: The meaning, as Markdown; links are relative to ``docs``.
        logged: The condition for the metric to be logged, as Markdown; empty for no condition beyond the section's.
    """

    name: str
    section: str
    group: str
    meaning: str
    logged: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression for the metric's keys in training."""
        return re.escape(self.name).replace("turn_00", r"turn_\d+").replace("…", ".+")


METRICS: Final = tuple(
    Metric(name=name, section=section, group=group, meaning=meaning, logged=logged)
    for section, rows in LISTED.items()
    for name, group, meaning, logged in rows
)
"""Every metric, in the order of ``docs/metrics.md``."""


@functools.cache
def metric_of(key: str) -> Metric | None:
    """The metric that a key of the log belongs to; None for other keys, such as those of transformers.

    An evaluation's keys are found with their prefix, ``eval_`` or, with several evaluation sets, ``eval_NAME_``.

    >>> metric_of("reward/turn_07").group, metric_of("eval_win_rate").group, metric_of("train_runtime")
    ('by_turn', 'summary', None)
    """
    for prefix in ("", "eval_", "eval_.+?_"):
        for metric in METRICS:
            # The pattern of a metric that only evaluations have begins with the prefix already.
            pattern = prefix + metric.pattern.removeprefix("eval_") if prefix else metric.pattern
            if re.fullmatch(pattern, key, re.DOTALL):
                return metric
    return None
