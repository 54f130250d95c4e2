"""Select rollouts from a store, write episodes to a store, and find the tasks to play."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.cli.console import UsageError, usage_errors
from agentsgym.cli.options import key_values
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.datasets.options import tasks_of
from agentsgym.errors import StoreError, did_you_mean
from agentsgym.recorded.messages import json_lines
from agentsgym.store.reader import RolloutStore
from agentsgym.store.schema import INTS, METADATA_INTS, METADATA_TEXTS
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.datasets.naming import NamedEnv

_CONDITION: Final = re.compile(r"\s*(\w+)\s*(!=|<=|>=|==?|<|>)(.*)", re.DOTALL)
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys((*METADATA_TEXTS, "session_id", "stop_reason", "error"), str),
    **dict.fromkeys((*METADATA_INTS, *INTS, "seed", "num_turns", "num_tokens", "num_agent_tokens"), int),
    "final_reward": float,
    "success": bool,
}
COLUMNS: Final = tuple(_KINDS)
"""The columns valid in ``--where``: all columns of numbers, strings and booleans."""


def open_store(path: Path, where: Sequence[str] | None = None) -> RolloutStore:
    """Open a store, restricted to the rollouts that meet all conditions."""
    try:
        store = RolloutStore(path)
    except StoreError as error:
        raise UsageError(sentence_of(error)) from error
    conditions = [_condition(text) for text in where or ()]
    if not len(store):
        unread = f": none of its {len(store.skipped)} parquet files can be read" if store.skipped else ""
        inside = next((part.parent for part in sorted(path.glob("*/*.parquet"))), None)
        hint = f"; did you mean {inside}?" if inside and not unread else ""
        raise UsageError(f"the store {path} contains no rollouts{unread}{hint}")
    found = store
    for column, passes in conditions:
        found = found.filter(**{column: passes})
    if not len(found):
        raise UsageError(f"none of the {len(store)} rollouts in {path} matches --where {' --where '.join(where or ())}")
    return found


def check_store_path(path: Path | None, *, resume: bool = False) -> None:
    """Check, before episodes are played, that they can be stored."""
    if path is None:
        if resume:
            raise UsageError("--resume requires --store PATH")
        return
    try:
        RolloutStore.writer(path).close()
    except StoreError as error:
        raise UsageError(sentence_of(error)) from error


def _condition(text: str) -> tuple[str, Callable[[Any], bool]]:
    """Parse ``COLUMN=VALUE`` into the column and a predicate of its values."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"--where must be COLUMN=VALUE, with =, !=, <, <=, > or >= in the middle, got {shown(text)}")
    column, sign, value_text = match[1], match[2], match[3].strip()
    if column not in COLUMNS:
        raise UsageError(f"--where: unknown column {shown(column)}{did_you_mean(column, COLUMNS)}")
    wanted, compare = _value(column, value_text), _OPERATORS[sign]
    if sign in {"=", "==", "!="}:
        return column, lambda value: compare(value, wanted)
    if wanted is None:
        raise UsageError(f"--where {text}: null can only be compared with = and !=")
    return column, lambda value: value is not None and compare(value, wanted)


def _value(column: str, text: str) -> Any:
    """Parse a value of a column; ``null`` stands for an unknown value."""
    kind = _KINDS[column]
    if text == "null":
        return None
    if kind is str:
        return text
    if kind is bool:
        if text not in {"true", "false"}:
            raise UsageError(f"--where {column} must be true, false or null, got {shown(text)}")
        return text == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(f"--where {column} must be a number or null, got {shown(text)}") from error


def read_tasks(path: Path) -> list[Any]:
    """Read tasks or dataset rows from a file: a JSON list, or one JSON object per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--tasks: {path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return cast("list[Any]", json.loads(text))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--tasks: {path} is not a valid JSON list: {error}") from error
    with usage_errors():
        return [task for _, task in json_lines(path)]


def tasks_for(  # noqa: PLR0913  # keywords
    env: MultistepEnv,
    named: NamedEnv,
    *,
    path: Path | None,
    split: str,
    dataset: list[str] | None,
    most: int,
    seed: int = 0,
) -> list[Any]:
    """Return up to ``most`` tasks to play: those in a file, or those of a split of the environment's dataset.

    ``dataset`` are options of the dataset, which replace those in the environment's name. If the environment has no
    dataset, the tasks are seeds drawn from ``seed``.
    """
    with usage_errors():
        options = {**named.dataset_options, **named.settings("dataset", key_values(dataset, "--dataset"))}
    if split not in {"train", "eval"}:
        raise UsageError(f"--split must be train or eval, got {split!r}")
    if path is not None:
        if options:
            raise UsageError("--tasks cannot be combined with --dataset, which sets options of ENV's built-in tasks")
        tasks = read_tasks(path)[:most]
    else:
        with usage_errors():
            tasks = tasks_of(env, split, options, most, seed=seed)
    if not tasks:
        raise UsageError(f"--tasks: {path} contains no tasks" if path else "the environment's dataset is empty")
    with usage_errors():
        for index, task in enumerate(tasks_of_rows(env, tasks, "tasks")):
            env.check_task(task, f"tasks[{index}]")
    return tasks
