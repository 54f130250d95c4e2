"""Create dataset rows, whose tasks are seeds: even for training and odd for evaluation, so that they are disjoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import DrawnOptions, Part, checked_options, dataset_of, drawn_options, task_seed

if TYPE_CHECKING:
    from datasets import Dataset


class DatasetOptions(DrawnOptions, total=False):
    """Options of the generated rows.

    Attributes:
        size: The number of rows; by default 1000 for training and 100 for evaluation.
        seed: The seed from which the tasks' seeds are derived.
    """


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Create the rows for training or evaluation.

    Raises:
        ConfigError: An option is unknown or invalid.
    """
    settings = checked_options(options, drawn_options(1000 if part == "train" else 100))
    seeds = (task_seed(part, "textarena task", settings["seed"], row) for row in range(settings["size"]))
    return dataset_of(({"seed": seed} for seed in seeds), class_path(env_class), env_config)
