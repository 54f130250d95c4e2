"""The list of rollouts: its columns, and the rollouts that share a task group or a task."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.envs.datasets.naming import name_of_env
from agentsgym.errors import StoreError
from agentsgym.store.values import from_json
from agentsgym.types import StopReason, Trajectory
from agentsgym.viewer.plain import number, text_of, truncate

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

_KEYS: Final = (
    *("run", "source", "agent", "env_class_path", "env_config"),
    *("step", "generation", "group", "task_index", "task_data"),
)
_COPIED: Final = (
    *("step", "generation", "task_index", "rollout_index", "seed", "num_turns", "num_tokens", "num_agent_tokens"),
    "final_reward",
)
_NAMED: Final = ("component_names", "final_components")
_OUTCOMES: Final = ("won", "lost", "played", "failed")
_MAX_TASK_CHARS: Final = 200
_MAX_METRICS: Final = 16  # columns


class Index:
    """The newest rollouts of a store.

    Attributes:
        total: The number of rollouts in the store.
        rows: The indices of the listed rollouts in the folder, oldest first.
        columns: One value per rollout for each column; for columns in ``words``, indices into its lists.
        words: The distinct texts of each text column.
        groups: The rollouts of each task group by its key, as indices in the folder.
    """

    def __init__(self, store: RolloutStore, limit: int) -> None:
        """Read the columns.

        Raises:
            StoreError: A file is missing or damaged.
        """
        view = store[max(0, len(store) - limit) :]
        self.total = len(store)
        self.rows: Sequence[int] = view.rows
        others = ("stop_reason", "success", "created_at", "info")
        table = view.table([*dict.fromkeys((*_KEYS, *_COPIED, *_NAMED, *others))])
        values = {name: table.column(name).to_pylist() for name in table.column_names}
        self.words: dict[str, list[str]] = {}
        self.columns: dict[str, list[Any]] = {"row": [*self.rows]}
        self._add_columns(values)
        groups: dict[Hashable, int] = {}
        tasks: dict[Hashable, int] = {}
        keys = [*_keys(values)]
        self.columns["group"] = [groups.setdefault(group, len(groups)) for group, _ in keys]
        self.columns["task"] = [tasks.setdefault(task, len(tasks)) for _, task in keys]
        self._shown = frozenset(self.rows)
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
        return row in self._shown


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


def _keys(values: dict[str, list[Any]]) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield keys of each rollout's task group and task; a task's includes its environment."""
    for row in zip(*(values[name] for name in _KEYS), strict=True):
        run, source, agent, path, config, step, generation, group, task_index, task_data = row
        identity = (run, task_index) if task_data in {None, "{}"} else task_data
        task = (path, config, identity)
        if generation is not None and group is not None:
            yield (run, generation, group), task
        else:
            yield (run, source, agent, step, task), task
