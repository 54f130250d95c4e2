"""Create dataset rows; some objects are secrets for training, the others for evaluation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import (
    COMMON_OPTIONS,
    CommonOptions,
    Part,
    checked_options,
    dataset_of,
    names_in_part,
    row_env,
    shuffled,
    task_seed,
)
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows.

    Attributes:
        size: The number of rows; by default one per secret.
        seed: The seed that determines the order of secrets and the tasks' seeds, but not the split of the secrets.
        split: ``"disjoint"`` if training and evaluation share no secret; ``"all"`` if both use every secret, with
            disjoint task seeds.
        eval_fraction: The fraction of the secrets that ``"disjoint"`` reserves for evaluation, in (0, 1).
    """


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return rows, each secret equally often (± 1), with ``env_class_path``, ``env_config`` and ``task_data``.

    Raises:
        ConfigError: An option is unknown or invalid, or there are too few secrets to split.
    """
    settings = checked_options(options, COMMON_OPTIONS)
    secrets: Sequence[str] = row_env(env_class, env_config, "gamemaster").candidates.objects
    chosen = names_in_part(secrets, part, settings, "objects", topic="twenty questions")
    generator = random.Random(derive_seed("twenty questions rows", part, settings["seed"]))
    tasks = [
        {"solution": solution, "seed": task_seed(part, "twenty questions task", settings["seed"], row)}
        for row, solution in enumerate(shuffled(chosen, settings["size"], generator))
    ]
    return dataset_of(tasks, class_path(env_class), env_config)
