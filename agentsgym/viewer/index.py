"""The list of rollouts: its columns, and which rollouts share a task group, a task or a generation batch."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from agentsgym.envs.datasets.naming import name_of_env
from agentsgym.errors import StoreError
from agentsgym.store.values import from_json
from agentsgym.types import StopReason, Trajectory
from agentsgym.viewer.plain import cut, number, text_of

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

_KEYS: Final = ("run", "source", "agent", "env_class_path", "env_config", "step", "generation", "group", "task_index")
_CONTEXT: Final = (*_KEYS, "task_data")
_COPIED: Final = (
    *("step", "generation", "task_index", "rollout_index", "seed", "num_turns", "num_tokens", "num_agent_tokens"),
    "final_reward",
)
_OUTCOMES: Final = ("won", "lost", "played", "failed")
_NEAR: Final = 4096  # rollouts before and after the list that may belong to a group in it
_MOST_CONTEXT: Final = 200_000
_LONGEST_TASK: Final = 200  # characters in the list
_MOST_METRICS: Final = 16  # columns


class Keys(NamedTuple):
    """What related rollouts share.

    Attributes:
        group: Shared within a task group.
        task: Shared by the rollouts of one task of one environment.
        batch: Shared by the rollouts whose advantages were computed together; None outside training.
    """

    group: Hashable
    task: Hashable
    batch: Hashable


class Batch(NamedTuple):
    """Rollouts whose advantages are computed together: a generation batch of training, or any other task group.

    Attributes:
        rows: Their indices in the folder, including those beyond the list.
        groups: The task group of each.
        is_training: Whether they were trained on.
    """

    rows: Sequence[int]
    groups: Sequence[Hashable]
    is_training: bool


class Index:
    """The newest rollouts of a store.

    Attributes:
        total: The number of rollouts in the store.
        rows: The indices of the listed rollouts in the folder, oldest first.
        columns: One value per rollout by column; for columns in ``words``, indices into them.
        words: The texts of these columns.
        groups: The rollouts of each task group by its key, as indices in the folder.
    """

    def __init__(self, store: RolloutStore, limit: int) -> None:
        """Read the columns.

        Args:
            store: The rollouts.
            limit: The number of rollouts listed, the newest ones.

        Raises:
            StoreError: A file is missing or damaged.
        """
        view = store[max(0, len(store) - limit) :]
        self._store = store
        self._lock = threading.Lock()
        self.total = len(store)
        self.rows: Sequence[int] = view.rows
        names = dict.fromkeys((*_CONTEXT, *_COPIED, "stop_reason", "success", "created_at", "info"))
        values = _read(view, [*names])
        self.words: dict[str, list[str]] = {}
        self.columns: dict[str, list[Any]] = {"row": [*self.rows]}
        self._add_columns(values)
        groups: dict[Hashable, int] = {}
        tasks: dict[Hashable, int] = {}
        keys = [*_keys(values)]
        self.columns["group"] = [groups.setdefault(one.group, len(groups)) for one in keys]
        self.columns["task"] = [tasks.setdefault(one.task, len(tasks)) for one in keys]
        self._keys = dict(zip(self.rows, keys, strict=True))
        self.groups: dict[int, list[int]] = defaultdict(list)
        for row, group in zip(self.rows, self.columns["group"], strict=True):
            self.groups[group].append(row)

    def _add_columns(self, values: dict[str, list[Any]]) -> None:
        configs = zip(values["env_class_path"], values["env_config"], strict=True)
        self._add_words("env", [environment_label(path, config) for path, config in configs])
        for name in ("source", "agent", "run", "stop_reason"):
            self._add_words(name, values[name])
        self._add_words("task_data", [_task_line(text) for text in values["task_data"]])
        self.words["outcome"] = [*_OUTCOMES]
        self.columns["outcome"] = [
            _OUTCOMES.index("failed" if reason == "failed" else {None: "played", True: "won", False: "lost"}[success])
            for reason, success in zip(values["stop_reason"], values["success"], strict=True)
        ]
        for name in _COPIED:
            self.columns[name] = [number(value) for value in values[name]]
        self.columns["group_index"] = [number(value) for value in values["group"]]
        self.columns["created_at"] = [value and round(value.timestamp(), 3) for value in values["created_at"]]
        metrics = [_metrics(text) for text in values["info"]]
        for name in [*dict.fromkeys(name for one in metrics for name in one)][:_MOST_METRICS]:
            self.columns[f"info/{name}"] = [number(one.get(name)) for one in metrics]

    def _add_words(self, name: str, values: Sequence[str | None]) -> None:
        places: dict[str, int] = {}
        self.columns[name] = [None if one is None else places.setdefault(one, len(places)) for one in values]
        self.words[name] = [*places]

    def __contains__(self, row: int) -> bool:
        return row in self._keys

    def batch(self, group: int) -> Batch:
        """Find the rollouts that a task group's advantages are computed with, by its key.

        Raises:
            StoreError: A file is missing or damaged.
        """
        own = self._keys[self.groups[group][0]]
        with self._lock:
            keys, together = self._around
        rows = together[own.batch or own.group]
        return Batch(rows=rows, groups=[keys[row].group for row in rows], is_training=own.batch is not None)

    @functools.cached_property
    def _around(self) -> tuple[Mapping[int, Keys], Mapping[Hashable, list[int]]]:
        """The keys of the rollouts in and near the list, and these rollouts by batch."""
        keys = self._keys
        low, high = (max(0, min(self.rows) - _NEAR), max(self.rows) + _NEAR) if self.rows else (0, 0)
        near = self._store.unfiltered[low:high]
        if len(self.rows) < len(near) <= _MOST_CONTEXT:
            keys = dict(zip(near.rows, _keys(_read(near, _CONTEXT)), strict=True))
        found: defaultdict[Hashable, list[int]] = defaultdict(list)
        for row, one in keys.items():
            found[one.batch or one.group].append(row)
        return keys, found


def _read(store: RolloutStore, names: Sequence[str]) -> dict[str, list[Any]]:
    table = store.table(names)
    return {name: table.column(name).to_pylist() for name in names}


@functools.lru_cache(256)
def environment_label(class_path: str | None, config: str | None) -> str | None:
    """Name an environment as the command line does, with its game; a user's environment by its class.

    >>> environment_label("my_games.chess.Chess", None)
    'Chess'
    """
    try:
        values: Any = from_json(config or "{}")
    except StoreError:
        values = {}
    return name_of_env(class_path, cast("Any", values) if isinstance(values, dict) else {})


@functools.lru_cache(4096)
def _task_line(task_data: str | None) -> str | None:
    """A task in one line; the seed has its own column."""
    try:
        task = from_json(task_data or "{}")
    except StoreError:
        return None
    parts = [f"{text_of(name)}: {text_of(value)}" for name, value in task.items() if name != "seed"]
    return cut(" · ".join(parts), _LONGEST_TASK)[0] or None


@functools.lru_cache(4096)
def _metrics(info: str | None) -> Mapping[str, float]:
    """The numbers in ``info``, as in :attr:`Trajectory.metrics`."""
    try:
        given = from_json(info or "{}")
    except StoreError:
        return {}
    return Trajectory(
        token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE, info=given
    ).metrics


def _keys(values: dict[str, list[Any]]) -> Iterator[Keys]:
    for row in zip(*(values[name] for name in _CONTEXT), strict=True):
        run, source, agent, path, config, step, generation, group, task_index, task_data = row
        own_task = (run, task_index) if task_data in {None, "{}"} else task_data
        task = (path, config, own_task)
        if generation is not None and group is not None:
            yield Keys((run, generation, group), task, (run, generation))
        else:
            yield Keys((run, source, agent, step, task), task, None)
