"""Choose the tasks of each generation batch so that they are neither too hard nor too easy.

::

    rows ─▶ levels ─▶ recent win rate of each ─▶ draw from levels within the bounds ─▶ rows of the next batch
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from datasets import IterableDataset

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_fraction, is_int, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from agentsgym.envs.dataset_rows import DatasetRow
    from agentsgym.training.metrics.rollouts import RolloutSummary

Level = str | int | float | bool


class Curriculum:
    """Draws training tasks from levels whose win rates lie between two bounds.

    Rollouts of a task that is always or never solved carry no learning signal. Each task group of a generation batch is
    therefore drawn, at random, from a level whose recent win rate lies within the bounds. If there is none, it is drawn
    from the nearest level above or below the bounds. A level without enough results is eligible too; if all levels are
    numbers, where higher is harder, only once the win rate of the next easier level has reached the lower bound. A
    fraction ``explore`` of the groups is drawn uniformly from all levels, since win rates change as the policy learns.

    The draws depend on the settings' seed, the number of the generation batch and the results of earlier batches, which
    are part of checkpoints: they are the same on all ranks, for any number of ranks, and after a resume.
    """

    def __init__(
        self,
        level: str | Callable[[DatasetRow], Level],
        *,
        low: float = 0.2,
        high: float = 0.8,
        explore: float = 0.1,
        window: int = 64,
        min_results: int = 8,
    ) -> None:
        """Set the bounds; the trainer provides the rows later, through :meth:`bind`.

        Args:
            level: The level of a row (a string, number or bool), given as a column of the rows, a key of ``task_data``,
                or a function of the row. A key that differs for every task makes each task a level.
            low: Lower bound of a level's win rate, in [0, 1].
            high: Upper bound, above ``low``.
            explore: Fraction of task groups that are drawn uniformly from all levels, in [0, 1].
            window: Number of a level's latest rollouts over which its win rate is computed.
            min_results: Minimum number of results for a win rate.

        Raises:
            ConfigError: A value is not valid.
        """
        require("level", level, lambda value: isinstance(value, str) or callable(value), "a name or a function")
        for name, value in (("low", low), ("high", high), ("explore", explore)):
            require(name, value, is_fraction, "a number in [0, 1]")
        if low >= high:
            raise ConfigError(f"a curriculum's low must be below its high, got {low} and {high}")
        require("window", window, is_int(1), "a positive int")
        require("min_results", min_results, is_int(1), "a positive int")
        if min_results > window:
            raise ConfigError(f"min_results must be at most window, got {min_results} and {window}")
        self._level = level
        self._low, self._high, self._explore = low, high, explore
        self._window, self._min_results = window, min_results
        self._rows: dict[Level, list[int]] = {}
        self._levels: list[Level] = []
        self._is_ordered = False
        self._results: dict[Level, deque[bool]] = {}
        self._num_without_outcome = 0  # rollouts since the last with a known outcome

    @property
    def options(self) -> dict[str, Any]:
        """The settings, as JSON values."""
        name = self._level if isinstance(self._level, str) else getattr(self._level, "__qualname__", "function")
        bounds = {"low": self._low, "high": self._high, "explore": self._explore}
        return {"level": name, **bounds, "window": self._window, "min_results": self._min_results}

    @property
    def win_rates(self) -> dict[Level, float]:
        """The win rate of each level that has enough results."""
        return {
            level: sum(results) / len(results)
            for level, results in self._results.items()
            if len(results) >= self._min_results
        }

    def bind(self, dataset: Any) -> None:
        """Find the levels of the rows to draw from.

        Args:
            dataset: Dataset rows, with a length.

        Raises:
            ConfigError: The dataset is an ``IterableDataset``, or a row has no valid level.
        """
        if isinstance(dataset, IterableDataset):
            raise ConfigError("a curriculum requires a dataset with random access, not an IterableDataset")
        rows: dict[Level, list[int]] = {}
        for index, row in enumerate(dataset):
            rows.setdefault(self.level_of(row, f"row {index}"), []).append(index)
        self._is_ordered = all(isinstance(level, int | float) for level in rows)
        self._rows, self._levels = rows, sorted(rows, key=None if self._is_ordered else repr)  # type: ignore[arg-type]
        self.reset()

    def level_of(self, row: DatasetRow, name: str = "a row") -> Level:
        """Find a row's level, a string, a finite number or a bool."""
        if callable(self._level):
            try:
                level: Any = self._level(row)
            except KeyError as error:
                meant = f"level(row) receives the row, whose task is row['task_data'], as in row['task_data'][{error}]"
                raise ConfigError(f"{name} has no column {error}: {meant}") from error
        else:
            task = cast("Mapping[str, Any]", row.get("task_data") or {})
            level = row.get(self._level) if row.get(self._level) is not None else task.get(self._level)
            if level is None:
                known = [key for key in (*row, *task) if key not in ("env_class_path", "env_config", "task_data")]
                hint = did_you_mean(self._level, known)
                raise ConfigError(f"{name} has no column or task_data key {self._level!r} to take its level from{hint}")
        if not isinstance(level, str | int | float) or (isinstance(level, float) and not math.isfinite(level)):
            raise ConfigError(
                f"{name} has the level {shown(level)}: a level must be a string, a finite number or a bool"
            )
        return level

    def draw(self, *seed_parts: str | int) -> int:
        """Draw the row of one task group.

        Args:
            *seed_parts: Identify the group; with equal results so far, equal parts draw the same row.

        Returns:
            Index of the row.
        """
        stream = random.Random(derive_seed("curriculum", *seed_parts))
        levels = self._levels if stream.random() < self._explore else self.eligible()
        return stream.choice(self._rows[stream.choice(levels)])

    def eligible(self) -> list[Level]:
        """The levels from which the next task group is drawn, unless it explores."""
        if not self._levels:
            raise ConfigError("a curriculum has no levels before the trainer, or bind(rows), has given it rows")
        rates = self.win_rates
        within = [level for level in self._levels if level in rates and self._low <= rates[level] <= self._high]
        untried = [level for level in self._levels if level not in rates]
        if self._is_ordered:
            easier = dict(zip(self._levels[1:], self._levels, strict=False))
            untried = [one for one in untried if one not in easier or rates.get(easier[one], 0.0) >= self._low]
        chosen = {*within, *untried}
        if not chosen:
            above = [level for level in rates if rates[level] > self._high]
            below = [level for level in rates if rates[level] < self._low]
            chosen = {*sorted(above, key=lambda level: rates[level])[:1], *sorted(below, key=lambda x: -rates[x])[:1]}
        return [level for level in self._levels if level in chosen]

    def record(self, rows: Sequence[DatasetRow], rollouts: Iterable[RolloutSummary]) -> None:
        """Record the results of rollouts; failed rollouts are ignored, and an unknown outcome counts as a loss.

        Args:
            rows: The row of each rollout.
            rollouts: The rollouts.

        Raises:
            ConfigError: ``window`` consecutive rollouts had no known outcome.
        """
        played = [(row, one.success) for row, one in zip(rows, rollouts, strict=True) if not one.failed]
        is_known = any(success is not None for _, success in played)
        self._num_without_outcome = 0 if is_known else self._num_without_outcome + len(played)
        if self._num_without_outcome >= self._window:
            raise ConfigError(
                f"a curriculum needs win rates, but none of the last {self._num_without_outcome} rollouts had "
                "info['success']: report it from the environment's step"
            )
        for row, success in played:
            self._results.setdefault(self.level_of(row), deque(maxlen=self._window)).append(bool(success))

    def reset(self) -> None:
        """Forget all results."""
        self._results, self._num_without_outcome = {}, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the results as JSON values: ``{"results": [[level, [0, 1, …]], …]}``."""
        return {"results": [[level, [int(won) for won in results]] for level, results in self._results.items()]}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore results from :meth:`state_dict`; the results of levels that no longer exist are dropped."""
        self._results = {
            level: deque((bool(won) for won in results), maxlen=self._window)
            for level, results in state["results"]
            if level in self._rows
        }

    def metrics(self) -> dict[str, float]:
        """Return ``curriculum/levels_known`` and ``curriculum/levels_in_bounds``, fractions of all levels."""
        rates = self.win_rates.values()
        num_within = sum(self._low <= rate <= self._high for rate in rates)
        num_levels = max(1, len(self._levels))
        return {
            "curriculum/levels_known": len(rates) / num_levels,
            "curriculum/levels_in_bounds": num_within / num_levels,
        }
