"""The groups of metrics, of which :class:`~agentsgym.training.settings.reporting.ReportSettings` chooses some."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

GROUPS: Final[Mapping[str, str]] = MappingProxyType({
    "summary": "what a person reads first: reward, wins, failures, loss, entropy",
    "info": "the numbers that environments give in `info`, one key each",
    "stops": "why rollouts ended, and what went wrong in them",
    "lengths": "turns and tokens",
    "by_turn": "one key for every turn index",
    "by_role": "one key for every role",
    "by_environment": "one key for every environment of a mixed batch",
    "credit": "what advantages are made from: spread, groups, filters, curriculum, value head",
    "loss": "what the loss and the optimizer do",
    "sampler": "how far the sampler is from the model",
})  # fmt: skip
"""The groups of metrics, and what each holds. ``GRPOEnvConfig.log_metrics`` chooses among them."""
