"""Make dataset rows of tasks: seeds and reset arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import (
    COMMON_OPTIONS,
    CommonOptions,
    Part,
    checked_options,
    names_in_part,
    row_env,
    rows_of,
)
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, or_none

if TYPE_CHECKING:
    from datasets import Dataset

_NUM_SEEDS = 256


class DatasetOptions(CommonOptions, total=False):
    """Options of the dataset.

    Attributes:
        tasks: Reset arguments, one dict per task, such as ``[{"index": 0}, {"index": 1}]``; None for only seeds.
        size: Number of rows; by default one per task, or 256 without ``tasks``.
        seed: Random seed of the tasks' order and seeds; it never moves a task between training and evaluation.
        split: Whether the splits share tasks: ``"disjoint"`` (they share none) or ``"all"`` (each has all of them).
        eval_fraction: Fraction of tasks that ``"disjoint"`` reserves for evaluation, in (0, 1).
    """

    tasks: Sequence[Mapping[str, Any]] | None


_OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "tasks": Field(
        default=None,
        expected="a list of at least one dict, or None",
        valid=or_none(
            lambda value: (
                isinstance(value, Sequence)
                and len(cast("Sequence[Any]", value)) > 0
                and all(isinstance(one, Mapping) for one in cast("Sequence[Any]", value))
            )
        ),
    ),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a split, with ``env_config`` unchanged; the server is not contacted."""
    row_env(env_class, env_config, "action", "observation")  # raises if rows cannot store the configuration
    settings = checked_options(options, _OPTIONS)
    if settings["tasks"] is None:
        settings = {**settings, "size": _NUM_SEEDS if settings["size"] is None else settings["size"]}
        return rows_of([{}], class_path(env_class), env_config, part, settings)
    try:
        tasks = {json.dumps(task, sort_keys=True): task for task in settings["tasks"]}
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tasks of dataset rows must be plain JSON: {error}") from error
    names = names_in_part([*tasks], part, settings, "tasks")
    return rows_of([tasks[name] for name in names], class_path(env_class), env_config, part, settings)
