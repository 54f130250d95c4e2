"""The settings that say what of a training run is shown and sent to trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int
from agentsgym.texts import shown
from agentsgym.training.settings.fields import number
from agentsgym.training.settings.metric_groups import GROUPS

_ALL: Final = "all"

if TYPE_CHECKING:
    Groups = str | list[str] | None
else:
    Groups = list[str]  # a command line has but one type a setting: --log_metrics summary by_turn


@dataclass
class ReportSettings:
    """What is shown in the terminal and sent to the trackers of ``report_to``.

    Attributes:
        log_metrics: The groups of metrics that trackers and the terminal get, keys of
            :data:`agentsgym.training.metrics.registry.GROUPS`. ``"all"``: trackers get everything, the terminal the
            group ``"summary"``. In either case ``trainer.state.log_history`` has everything.
        log_conversations: How many whole conversations of the newest generation batch are shown whenever metrics are
            logged, from the best to the worst: in the terminal, and as tables (and traces) in wandb and trackio; 0 for
            none.
    """

    log_metrics: Groups = number(  # noqa: RUF009  # it makes a field
        _ALL,
        "Groups of metrics, or 'all'.",
        expected="'all' or a list of names",
        valid=lambda value: _names(value) != (),
    )
    log_conversations: int = number(
        0, "Whole conversations shown at every log.", expected="a non-negative int", valid=is_int(0)
    )

    @property
    def tracked_groups(self) -> frozenset[str]:
        """The groups that trackers get."""
        names = _names(self.log_metrics)
        return frozenset(GROUPS if names == (_ALL,) else names)

    @property
    def printed_groups(self) -> frozenset[str]:
        """The groups that the terminal gets."""
        names = _names(self.log_metrics)
        return frozenset({"summary"} if names == (_ALL,) else names)

    def check_groups(self) -> None:
        """Raise :class:`ConfigError` for a group that there is not."""
        names, known = _names(self.log_metrics), (_ALL, *GROUPS)
        for name in names if names != (_ALL,) else ():
            if name not in GROUPS:
                raise ConfigError(f"GRPOEnvConfig.log_metrics has no group {shown(name)}{did_you_mean(name, known)}")


def _names(value: Any) -> tuple[str, ...]:
    """The names that are given; none if the value is not valid. None is what command lines make of no value."""
    given = [_ALL if value is None else value] if value is None or isinstance(value, str) else value
    if not isinstance(given, list | tuple):
        return ()
    names = cast("list[Any]", given)
    return tuple(names) if all(isinstance(name, str) for name in names) else ()
