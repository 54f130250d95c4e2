"""Send a run to the trackers of ``report_to`` so that none of them can end it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Final

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TrackioCallback
from trl.extras import profiling

from agentsgym.texts import sentence_of
from agentsgym.training.metrics.registry import metric_of

logger = logging.getLogger(__name__)

# By name, since importing the last one needs IPython.
_SHOWN: Final = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
_EVENTS: Final = tuple(name for name in dir(TrainerCallback) if name.startswith("on_"))


def choose_metrics(metrics: Mapping[str, Any], groups: Collection[str]) -> dict[str, Any]:
    """Keep the metrics of some groups, and metrics outside of all groups (from transformers or users)."""
    found = {key: metric_of(key) for key in metrics}
    return {key: value for key, value in metrics.items() if (one := found[key]) is None or one.group in groups}


def set_up_reports(callbacks: Iterable[TrainerCallback], tracked: Collection[str], printed: Collection[str]) -> None:
    """Limit callbacks that show metrics to their groups, and keep errors of trackers from the run.

    Args:
        callbacks: Those of a trainer; the ones of trackers, progress bars and printing are changed in place.
        tracked: The groups for trackers.
        printed: The groups for the terminal and a notebook's table.
    """
    _QuietTimes.failed.clear()
    module: Any = profiling  # where TRL looks this up whenever it starts a timing
    module.ProfilingContext = _QuietTimes
    names: dict[type[Any], str] = {kind: name for name, kind in INTEGRATION_TO_CALLBACK.items()}
    for callback in callbacks:
        name = names.get(type(callback))
        if name is not None:
            _wrap(callback, _Tracker(name, tracked).pass_on)
        elif _SHOWN & {kind.__name__ for kind in type(callback).__mro__}:
            _wrap(callback, lambda _event, inner, *args, **kwargs: inner(*args, **_select_groups(kwargs, printed)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


class _Tracker:
    """Passes events on to one tracker with its groups of metrics, and logs its first failure."""

    def __init__(self, name: str, groups: Collection[str]) -> None:
        self.name, self.groups = name, groups
        self.is_lost = False
        self._failed = False

    def pass_on(self, event: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the tracker; one that fails at the beginning is not called again, since each try may take minutes.

        It is taken out of ``report_to`` as well, because TRL calls trackers by their names there too.
        """
        if self.is_lost:
            return None
        try:
            return inner(*args, **_select_groups(kwargs, self.groups))
        except Exception as error:  # noqa: BLE001  # foreign code, which may raise anything
            if event == "on_train_begin":
                self.is_lost = True
                args[0].report_to = [name for name in args[0].report_to if name != self.name]
            if not self._failed:
                self._failed = True
                what = "gets no more data of this run" if self.is_lost else "may miss some of the logged data"
                why = sentence_of(error)
                logger.warning("the tracker %s failed (%s) and %s; training continues", self.name, why, what)
            return None


class _QuietTimes(profiling.ProfilingContext):
    """Times one of TRL's methods; TRL sends the time to trackers itself, whose errors are logged once."""

    failed: ClassVar[set[str]] = set()

    def _log_metrics(self, duration: float) -> None:
        names = self.report_to
        for name in names:
            self.report_to = [name]
            try:
                super()._log_metrics(duration)
            except Exception as error:  # noqa: BLE001  # foreign code, which may raise anything
                if name not in self.failed:
                    self.failed.add(name)
                    why = sentence_of(error)
                    logger.warning(
                        "the tracker %s failed (%s) and may miss some timings; training continues", name, why
                    )
        self.report_to = names


def _wrap(callback: TrainerCallback, around: Callable[..., Any]) -> None:
    for event in _EVENTS:
        setattr(callback, event, functools.partial(around, event, getattr(callback, event)))


def _select_groups(kwargs: dict[str, Any], groups: Collection[str]) -> dict[str, Any]:
    shown = {name: choose_metrics(kwargs[name], groups) for name in ("logs", "metrics") if kwargs.get(name)}
    return {**kwargs, **shown}


def begin_trackio(callbacks: Iterable[TrainerCallback], *args: Any, model: Any) -> None:
    """Begin trackio's run if that has not happened: TRL sends it step times, also in a stand-alone evaluation."""
    for callback in callbacks:
        if isinstance(callback, TrackioCallback):
            callback.on_train_begin(*args, model=model)  # pyright: ignore[reportUnknownMemberType]
