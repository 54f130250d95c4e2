"""The list of rollouts: its columns, and which rollouts are of one task group, one task, one generation batch."""

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
_NEAR: Final = 4096  # rollouts around the list that may be of a group in it
_MOST_CONTEXT: Final = 200_000
_LONGEST_TASK: Final = 200  # characters in the list
_MOST_METRICS: Final = 16  # columns


class Keys(NamedTuple):
    """What a rollout has in common with others.

    Attributes:
        group: With those of its task group.
        task: With those of the same task of the same environment.
        batch: With those whose advantages were computed together with its own; None outside training.
    """

    group: Hashable
    task: Hashable
    batch: Hashable


class Batch(NamedTuple):
    """Rollouts whose advantages are computed together: a generation batch of training, or any other task group.

    Attributes:
        rows: Their places in the folder, also of those that the list leaves out.
        groups: The task group of each.
        is_training: Whether they were trained on.
    """

    rows: Sequence[int]
    groups: Sequence[Hashable]
    is_training: bool


class Index:
    """The newest rollouts of a store.

    Attributes:
        total: Rollouts of the store.
        rows: The places of the listed rollouts in the folder, oldest first.
        columns: One value a rollout by column; those of ``words`` as indices into them.
        words: The texts of these columns.
        groups: By the key of each task group its rollouts, as places in the folder.
    """

    def __init__(self, store: RolloutStore, limit: int) -> None:
        """Read the columns.

        Args:
            store: The rollouts.
            limit: List the newest of so many.

        Raises:
            StoreError: A file is gone, or damaged.
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
        self._add_metrics([_metrics(text) for text in values["info"]])
        self._add_keys(values)

    def _add_columns(self, values: dict[str, list[Any]]) -> None:
        configs = zip(values["env_class_path"], values["env_config"], strict=True)
        self._add_words("env", [environment_label(path, config) for path, config in configs])
        for name in ("source", "agent", "run", "stop_reason"):
            self._add_words(name, values[name])
        self._add_words("task_data", [_task_line(text) for text in values["task_data"]])
        ends = zip(values["stop_reason"], values["success"], strict=True)
        self.words["outcome"] = [*_OUTCOMES]
        self.columns["outcome"] = [_OUTCOMES.index(_outcome(reason, success)) for reason, success in ends]
        for name in _COPIED:
            self.columns[name] = [number(value) for value in values[name]]
        self.columns["group_index"] = [number(value) for value in values["group"]]
        self.columns["created_at"] = [value and round(value.timestamp(), 3) for value in values["created_at"]]

    def _add_metrics(self, metrics: Sequence[Mapping[str, float]]) -> None:
        """Add a column ``info/NAME`` for each number that environments report."""
        names = dict.fromkeys(name for one in metrics for name in one)
        for name in [*names][:_MOST_METRICS]:
            self.columns[f"info/{name}"] = [number(one.get(name)) for one in metrics]

    def _add_words(self, name: str, values: Sequence[str | None]) -> None:
        places: dict[str, int] = {}
        self.columns[name] = [None if one is None else places.setdefault(one, len(places)) for one in values]
        self.words[name] = [*places]

    def _add_keys(self, values: dict[str, list[Any]]) -> None:
        groups: dict[Hashable, int] = {}
        tasks: dict[Hashable, int] = {}
        keys = [*_keys(values)]
        self.columns["group"] = [groups.setdefault(one.group, len(groups)) for one in keys]
        self.columns["task"] = [tasks.setdefault(one.task, len(tasks)) for one in keys]
        self._keys = dict(zip(self.rows, keys, strict=True))
        self._group_of = dict(zip(self.rows, self.columns["group"], strict=True))
        self.groups: dict[int, list[int]] = defaultdict(list)
        for row, group in zip(self.rows, self.columns["group"], strict=True):
            self.groups[group].append(row)

    def __contains__(self, row: int) -> bool:
        return row in self._keys

    def batch(self, group: int) -> Batch:
        """Find the rollouts that a task group's advantages are computed with.

        Args:
            group: The key of the group.

        Raises:
            StoreError: A file is gone, or damaged.
        """
        own = self._keys[self.groups[group][0]]
        with self._lock:
            keys, together = self._around
        rows = together[own.batch or own.group]
        return Batch(rows=rows, groups=[keys[row].group for row in rows], is_training=own.batch is not None)

    @functools.cached_property
    def _around(self) -> tuple[Mapping[int, Keys], Mapping[Hashable, list[int]]]:
        """The keys of the rollouts near the list, and these by what their advantages were computed together with."""
        keys = self._keys
        low, high = (max(0, min(self.rows) - _NEAR), max(self.rows) + _NEAR) if self.rows else (0, 0)
        near = self._store.whole[low:high]
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
    """Call an environment as the command line does, with its game; one of a user's own by its class.

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
    """A task in one line, with its answer if it has one; the seed has its own column."""
    try:
        task = from_json(task_data or "{}")
    except StoreError:
        return None
    parts = [f"{text_of(name)}: {text_of(value)}" for name, value in task.items() if name != "seed"]
    return cut(" · ".join(parts), _LONGEST_TASK)[0] or None


@functools.lru_cache(4096)
def _metrics(info: str | None) -> Mapping[str, float]:
    """The numbers in ``info``, as :attr:`Trajectory.metrics` has them."""
    try:
        given = from_json(info or "{}")
    except StoreError:
        return {}
    return Trajectory(
        token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE, info=given
    ).metrics


def _outcome(stop_reason: str | None, success: bool | None) -> str:
    if stop_reason == "failed":
        return "failed"
    return "played" if success is None else "won" if success else "lost"


def _keys(values: dict[str, list[Any]]) -> Iterator[Keys]:
    for row in zip(*(values[name] for name in _CONTEXT), strict=True):
        run, source, agent, path, config, step, generation, group, task_index, task_data = row
        own_task = (run, task_index) if task_data in {None, "{}"} else task_data
        task = (path, config, own_task)
        if generation is not None and group is not None:
            yield Keys((run, generation, group), task, (run, generation))
        else:
            yield Keys((run, source, agent, step, task), task, None)
