"""The settings of forks in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, is_int, one_of, require
from agentsgym.texts import shown

FORK_AT: Final = ("uniform", "entropy", "value")
"""The rules by which turns are chosen."""

_OPTIONS: Final[Mapping[str, tuple[Check, str]]] = {
    "at": (one_of(*FORK_AT), "one of " + ", ".join(map(repr, FORK_AT))),
    "width": (is_int(1), "a positive int"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSettings:
    """How rollouts are forked.

    Attributes:
        budget: Number of tokens that the forks of a task group may sample, on average over the task groups.
        at: Rule by which turns are chosen, one of :data:`FORK_AT`: all alike (``"uniform"``), or in proportion to the
            mean of -log p of the task group's turns with the same index (``"entropy"``), or to the standard deviation
            of the returns of its turns in the same state or, if there is only one, with the same index (``"value"``).
        width: Number of forks of a chosen turn.
    """

    budget: int
    at: str = "uniform"
    width: int = 3

    @classmethod
    def of(cls, budget: int, options: Mapping[str, Any]) -> ForkSettings | None:
        """Check the options of ``fork_kwargs``; None without a budget.

        Raises:
            ConfigError: An option is unknown or invalid, or there are options without a budget.
        """
        for name, value in options.items():
            if name not in _OPTIONS:
                raise ConfigError(f"GRPOEnvConfig.fork_kwargs[{shown(name)}] is unknown{did_you_mean(name, _OPTIONS)}")
            require(f"GRPOEnvConfig.fork_kwargs[{shown(name)}]", value, *_OPTIONS[name])
        if options and not budget:
            raise ConfigError(f"GRPOEnvConfig.fork_kwargs requires fork_budget > 0, got {shown(dict(options))}")
        return cls(budget=budget, **options) if budget else None
