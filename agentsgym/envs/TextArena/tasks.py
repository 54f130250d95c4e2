"""Make tasks as dataset rows: a task is a seed, even for training and odd for evaluation, so that they never meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from agentsgym.envs.rows.options import dataset_of_rows
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import is_int, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset

ENV_CLASS_PATH = "agentsgym.envs.TextArena.TextArenaEnv"
Part = Literal["train", "eval"]


class DatasetOptions(TypedDict, total=False):
    """Options of the rows that are made.

    Attributes:
        size: Number of rows; 1000 by default, 100 for evaluation.
        seed: From which the tasks' seeds are derived.
    """

    size: int
    seed: int


def task_rows(env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the rows of training or evaluation.

    Raises:
        ConfigError: An option is unknown or not valid.
    """
    settings: dict[str, Any] = {"size": 1000 if part == "train" else 100, "seed": 0}
    for name in options:
        if name not in settings:
            raise ConfigError(f"there is no dataset option {shown(name)}{did_you_mean(name, settings)}")
    settings.update(options)
    require("size", settings["size"], is_int(1), "a positive int")
    require("seed", settings["seed"], is_int(0), "an int >= 0")
    return [
        {
            "env_class_path": ENV_CLASS_PATH,
            "env_config": dict(env_config or {}),
            "task_data": {"seed": derive_seed("textarena task", settings["seed"], row) // 4 * 2 + (part == "eval")},
        }
        for row in range(settings["size"])
    ]


def task_dataset(env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]) -> Dataset:
    """Make the rows of :func:`task_rows` a dataset.

    Raises:
        ConfigError: As :func:`task_rows`.
    """
    return dataset_of_rows(task_rows(env_config, part, options))
