"""Make dataset rows out of tasks: which are trained on and which evaluated, in which order, with which seeds."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, is_number, one_of, or_none, require
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

Part = Literal["train", "eval"]

_COMMON: dict[str, Any] = {"size": None, "seed": 0, "split": "disjoint", "eval_fraction": 0.2}


def checked_options(given: Mapping[str, Any], own_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in and check the options of rows.

    Args:
        given: What the user wrote.
        own_defaults: Options of the environment beside the common ones, with their defaults; it checks them itself.

    Raises:
        ConfigError: An option is unknown, or a common one is not valid.
    """
    settings = {**_COMMON, **own_defaults}
    for name in given:
        if name not in settings:
            raise ConfigError(f"the dataset has no option {name!r}{did_you_mean(name, settings)}")
    settings.update(given)
    require("size", settings["size"], or_none(is_int(1)), "a positive int or None")
    require("seed", settings["seed"], is_int(0), "an int >= 0")
    require("split", settings["split"], one_of("disjoint", "all"), "'disjoint' or 'all'")
    require("eval_fraction", settings["eval_fraction"], _is_inner_fraction, "a number in (0, 1)")
    return settings


def part_of(names: Sequence[str], part: Part, settings: Mapping[str, Any], topic: str) -> list[str]:
    """Take the names of training or of evaluation; which is which depends on the names alone.

    Raises:
        ConfigError: There are too few to share out.
    """
    if settings["split"] == "all":
        return list(names)
    distinct = sorted({*names}, key=lambda name: derive_seed(f"{topic} split", name))
    if len(distinct) < 2:
        raise ConfigError(
            f"split='disjoint' needs at least 2 different {topic}, got {len(distinct)}; split='all' takes any"
        )
    num_eval = min(max(1, math.floor(len(distinct) * settings["eval_fraction"] + 0.5)), len(distinct) - 1)
    kept = set(distinct[:num_eval])
    return [name for name in names if (name in kept) == (part == "eval")]


def rows_of(
    tasks: Sequence[Mapping[str, Any]],
    env_class_path: str,
    env_config: Mapping[str, Any] | None,
    part: Part,
    settings: Mapping[str, Any],
) -> Dataset:
    """Make ``size`` rows (by default one a task), every task as often as the others, ± 1, shuffled by ``seed``.

    Task seeds are even for training and odd for evaluation: the two never meet.

    Raises:
        ConfigError: Something of it is not plain JSON.
    """
    generator = random.Random(derive_seed("rows", env_class_path, part, settings["seed"]))
    size: int = len(tasks) if settings["size"] is None else settings["size"]
    order: list[Mapping[str, Any]] = []
    while len(order) < size:
        order += generator.sample(tasks, len(tasks))
    seeds = (task_seed(env_class_path, part, settings["seed"], index) for index in range(size))
    seeded = [{**task, "seed": seed} for task, seed in zip(order, seeds, strict=False)]
    return dataset_of(seeded, env_class_path, env_config)


def dataset_of(
    tasks: Iterable[Mapping[str, Any]], env_class_path: str, env_config: Mapping[str, Any] | None
) -> Dataset:
    """Make a dataset row of each task of one environment, in order.

    Raises:
        ConfigError: Something of it is not plain JSON.
    """
    config = dict(env_config or {})
    return dataset_of_rows(
        {"env_class_path": env_class_path, "env_config": config, "task_data": dict(task)} for task in tasks
    )


def dataset_of_rows(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    """Make rows a dataset: a column of JSON each for ``env_config`` and ``task_data``, so that all rows go together.

    Raises:
        ConfigError: Something of it is not plain JSON.
    """
    from datasets import Dataset, Features, Json, Value  # noqa: PLC0415  # half a second that a game does not need

    listed = [dict(row) for row in rows]
    try:
        json.dumps(listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tasks and env_config of dataset rows must be plain JSON: {error}") from error
    columns: dict[str, Any] = {"env_class_path": Value("string"), "env_config": Json(), "task_data": Json()}
    return Dataset.from_list(listed, features=Features(columns))  # pyright: ignore[reportUnknownMemberType]


def task_seed(topic: str, part: Part, seed: int, index: int) -> int:
    """Derive the seed of a row's task."""
    return derive_seed("task", topic, seed, index) // 4 * 2 + (part == "eval")


def _is_inner_fraction(value: Any) -> bool:
    return is_number(0)(value) and 0 < value < 1
