"""Make tool-use tasks from any table of questions and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets import questions
from agentsgym.envs.datasets.options import CommonOptions, Part, checked_options, rows_of
from agentsgym.envs.datasets.sources import Column, read_columns, read_rows
from agentsgym.errors import ConfigError
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows.

    Attributes:
        data: The table: the path to a JSONL file, a list of dicts, a ``datasets.Dataset``, or a dict of arguments for
            ``datasets.load_dataset``.
        columns: The table column for each key of a task; see :func:`tasks_from`.
        size: The number of rows; by default one per question.
        seed: The seed of the order of questions and of the tasks' seeds; it never moves a question between the splits.
        split: ``"disjoint"`` if training and evaluation share no questions, ``"all"`` if each gets every question.
        eval_fraction: The fraction of questions that ``"disjoint"`` reserves for evaluation, in (0, 1).
    """

    data: Any
    columns: Mapping[str, str] | None


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a split, with ``env_config`` unchanged.

    Raises:
        ConfigError: There is no table, the table lacks a column or has no rows, or an option is invalid.
    """
    settings = checked_options(options, questions.OPTIONS)
    if settings["data"] is None:
        raise ConfigError(f"{env_class.__name__} has no built-in tasks: pass data=…, a table of questions and answers")
    tasks = questions.of_part(tasks_from(settings["data"], settings["columns"]), part, settings)
    return rows_of(tasks, class_path(env_class), env_config, part, settings)


def tasks_from(data: Any, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Read tasks from a table, in row order.

    Args:
        data: Any table that :func:`~agentsgym.envs.datasets.sources.read_rows` accepts.
        columns: The table column for each key of a task, such as ``{"question": "prompt", "answer": "gold"}``; further
            keys and columns may follow. None for columns named ``question`` and ``answer``.

    Returns:
        One ``task_data`` per row.

    Raises:
        ConfigError: The data is not a table, has no rows, or lacks a column.
    """
    chosen = {"question": "question", "answer": "answer"} if columns is None else dict(columns)
    if "question" not in chosen:
        raise ConfigError(f"columns must name the column of the 'question', got {shown(chosen)}")
    wanted = {key: Column(default=key, valid=lambda _: True, expected="anything") for key in chosen}
    return read_columns(read_rows(data, "data"), wanted, chosen, "data")
