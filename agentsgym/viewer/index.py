"""The list of rollouts: its columns, and the rollouts that share a task group, a task or a generation batch."""

from __future__ import annotations

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from agentsgym.envs.datasets.naming import name_of_env
from agentsgym.errors import StoreError
from agentsgym.store.values import from_json
from agentsgym.types import StopReason, Trajectory
from agentsgym.viewer.plain import number, text_of, truncate

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

_KEYS: Final = ("run", "source", "agent", "env_class_path", "env_config", "step", "generation", "group", "task_index")
_CONTEXT: Final = (*_KEYS, "task_data")
_COPIED: Final = (
    *("step", "generation", "task_index", "rollout_index", "seed", "num_turns", "num_tokens", "num_agent_tokens"),
    "final_reward",
)
_NAMED: Final = ("component_names", "final_components")
_OUTCOMES: Final = ("won", "lost", "played", "failed")
_MARGIN: Final = 4096  # rollouts before and after the list that may belong to one of its groups
_MAX_CONTEXT: Final = 200_000  # rollouts in the list and the margin
_MAX_TASK_CHARS: Final = 200
_MAX_METRICS: Final = 16  # columns


class Keys(NamedTuple):
    """Keys that are equal for related rollouts.

    Attributes:
        group: The key of the task group.
        task: The key of the task, which includes its environment.
        batch: The key of the rollouts whose advantages were computed together; None outside training.
    """

    group: Hashable
    task: Hashable
    batch: Hashable


class Batch(NamedTuple):
    """Rollouts whose advantages are computed together: a generation batch, or a task group outside training.

    Attributes:
        rows: The indices of the rollouts in the folder, including rollouts beyond the list.
        groups: The task group of each rollout.
        is_training: Whether the rollouts belong to training.
    """

    rows: Sequence[int]
    groups: Sequence[Hashable]
    is_training: bool


class Index:
    """The newest rollouts of a store.

    Attributes:
        total: The number of rollouts in the store.
        rows: The indices of the listed rollouts in the folder, oldest first.
        columns: One value per rollout for each column; for columns in ``words``, indices into its lists.
        words: The distinct texts of each text column.
        groups: The rollouts of each task group by its key, as indices in the folder.
        has_calls: Whether any listed rollout has a tree of calls.
    """

    def __init__(self, store: RolloutStore, limit: int) -> None:
        """Read the columns.

        Raises:
            StoreError: A file is missing or damaged.
        """
        view = store[max(0, len(store) - limit) :]
        self._store = store
        self._lock = threading.Lock()
        self.total = len(store)
        self.rows: Sequence[int] = view.rows
        others = ("stop_reason", "success", "created_at", "info", "turn_parents")
        values = _read(view, [*dict.fromkeys((*_CONTEXT, *_COPIED, *_NAMED, *others))])
        self.has_calls = any(values["turn_parents"])
        self.words: dict[str, list[str]] = {}
        self.columns: dict[str, list[Any]] = {"row": [*self.rows]}
        self._add_columns(values)
        groups: dict[Hashable, int] = {}
        tasks: dict[Hashable, int] = {}
        keys = [*_keys(values)]
        self.columns["group"] = [groups.setdefault(key.group, len(groups)) for key in keys]
        self.columns["task"] = [tasks.setdefault(key.task, len(tasks)) for key in keys]
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
        named = [_named(*one) for one in zip(*(values[name] for name in _NAMED), strict=True)]
        for prefix, found in (("rewards/", named), ("info/", [_metrics(text) for text in values["info"]])):
            for name in [*dict.fromkeys(name for one in found for name in one)][:_MAX_METRICS]:
                self.columns[f"{prefix}{name}"] = [number(one.get(name)) for one in found]

    def _add_words(self, name: str, values: Sequence[str | None]) -> None:
        places: dict[str, int] = {}
        self.columns[name] = [None if one is None else places.setdefault(one, len(places)) for one in values]
        self.words[name] = [*places]

    def __contains__(self, row: int) -> bool:
        return row in self._keys

    def batch(self, group: int) -> Batch:
        """Find the rollouts with which a task group's advantages are computed, by the group's key.

        Raises:
            StoreError: A file is missing or damaged.
        """
        first = self._keys[self.groups[group][0]]
        with self._lock:
            keys, batches = self._context
        rows = batches[first.batch or first.group]
        return Batch(rows=rows, groups=[keys[row].group for row in rows], is_training=first.batch is not None)

    @functools.cached_property
    def _context(self) -> tuple[Mapping[int, Keys], Mapping[Hashable, list[int]]]:
        """The keys of the rollouts in and around the list, and these rollouts by batch."""
        keys = self._keys
        low, high = (max(0, min(self.rows) - _MARGIN), max(self.rows) + _MARGIN) if self.rows else (0, 0)
        near = self._store.unfiltered[low:high]
        if len(self.rows) < len(near) <= _MAX_CONTEXT:
            keys = dict(zip(near.rows, _keys(_read(near, _CONTEXT)), strict=True))
        batches: defaultdict[Hashable, list[int]] = defaultdict(list)
        for row, key in keys.items():
            batches[key.batch or key.group].append(row)
        return keys, batches


def _read(store: RolloutStore, names: Sequence[str]) -> dict[str, list[Any]]:
    table = store.table(names)
    return {name: table.column(name).to_pylist() for name in names}


@functools.lru_cache(256)
def environment_label(class_path: str | None, config: str | None) -> str | None:
    """Return an environment's name as on the command line, with its variant; for a user's environment, the class name.

    >>> environment_label("my_games.chess.Chess", None)
    'Chess'
    """
    return name_of_env(class_path, _dict_of(config))


@functools.lru_cache(4096)
def _task_line(task_data: str | None) -> str | None:
    """Return a task's data in one line, without the seed, which has a separate column."""
    parts = [f"{text_of(name)}: {text_of(value)}" for name, value in _dict_of(task_data).items() if name != "seed"]
    return truncate(" · ".join(parts), _MAX_TASK_CHARS)[0] or None


def _named(names: str | None, numbers: Sequence[float | None] | None) -> Mapping[str, float]:
    """Return the components of the final reward; empty for a plain number."""
    keys: Any = _dict_of(f'{{"names": {names}}}').get("names") if names is not None and numbers is not None else None
    pairs = zip(cast("list[Any]", keys) if isinstance(keys, list) else (), numbers or (), strict=False)
    return {text_of(name): value for name, value in pairs if value is not None and not math.isnan(value)}


@functools.lru_cache(4096)
def _metrics(info: str | None) -> Mapping[str, float]:
    """Return the numbers in ``info``, as in :attr:`Trajectory.metrics`."""
    return Trajectory(
        token_ids=[], turns=[], messages=[], final_reward=0.0, stop_reason=StopReason.DONE, info=_dict_of(info)
    ).metrics


def _dict_of(text: str | None) -> dict[str, Any]:
    """Parse a stored dict; empty if the text is not one."""
    try:
        value: Any = from_json(text or "{}")
    except StoreError:
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _keys(values: dict[str, list[Any]]) -> Iterator[Keys]:
    for row in zip(*(values[name] for name in _CONTEXT), strict=True):
        run, source, agent, path, config, step, generation, group, task_index, task_data = row
        identity = (run, task_index) if task_data in {None, "{}"} else task_data
        task = (path, config, identity)
        if generation is not None and group is not None:
            yield Keys((run, generation, group), task, (run, generation))
        else:
            yield Keys((run, source, agent, step, task), task, None)
