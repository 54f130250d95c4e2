"""List every metric that a run logs: its name, its group, and what it means."""

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
        name: Its key in the log. ``turn_00`` stands for the index of any turn, ``…`` for a role or an environment.
        section: What it is measured on: the heading of its table in ``docs/metrics.md``.
        group: A key of :data:`GROUPS`.
        meaning: What it means, as Markdown; links are those of a page in ``docs``.
        logged: What it needs to be logged, likewise; empty for nothing but what its section names.
    """

    name: str
    section: str
    group: str
    meaning: str
    logged: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression of its keys in training."""
        return re.escape(self.name).replace("turn_00", r"turn_\d+").replace("…", ".+")


METRICS: Final = tuple(
    Metric(name=name, section=section, group=group, meaning=meaning, logged=logged)
    for section, rows in LISTED.items()
    for name, group, meaning, logged in rows
)
"""Every metric, in the order of ``docs/metrics.md``."""


@functools.cache
def metric_of(key: str) -> Metric | None:
    """Find the metric that a key of the log belongs to; None for a key that is none of ours, TRL's or the loss's.

    An evaluation's keys are found with their prefix, ``eval_`` or, with several evaluation sets, ``eval_NAME_``.

    >>> metric_of("reward/turn_07").group, metric_of("eval_win_rate").group, metric_of("train_runtime")
    ('by_turn', 'summary', None)
    """
    for prefix in ("", "eval_", "eval_.+?_"):
        for metric in METRICS:
            # That of a metric of evaluations alone begins with the prefix already.
            pattern = prefix + metric.pattern.removeprefix("eval_") if prefix else metric.pattern
            if re.fullmatch(pattern, key, re.DOTALL):
                return metric
    return None
