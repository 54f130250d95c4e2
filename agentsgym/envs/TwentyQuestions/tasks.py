"""Make tasks as dataset rows: some objects are secrets of training, the others of evaluation."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from agentsgym.envs.rows.options import dataset_of_rows
from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

ENV_CLASS_PATH = "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv"
Part = Literal["train", "eval"]


class DatasetOptions(TypedDict, total=False):
    """Options of the rows that are made.

    Attributes:
        size: Number of rows; by default one for each secret.
        seed: Orders the secrets and draws the tasks' seeds; it never moves a secret between training and evaluation.
        split: ``"disjoint"``: training and evaluation share no secret; ``"all"``: both have every secret, with task
            seeds that never meet.
        eval_fraction: Fraction of the secrets that ``"disjoint"`` keeps for evaluation, in (0, 1).
    """

    size: int | None
    seed: int
    split: str
    eval_fraction: float


def task_dataset(
    secrets: Sequence[str], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Rows of ``env_class_path``, ``env_config`` and ``task_data``, every secret as often as the others, ± 1.

    Raises:
        ConfigError: An option is unknown or not valid, or there are too few secrets to share out.
    """
    settings = _checked(options)
    chosen = part_of(secrets, part, settings)
    generator = random.Random(derive_seed("twenty questions rows", part, settings["seed"]))
    size = len(chosen) if settings["size"] is None else settings["size"]
    order: list[str] = []
    while len(order) < size:
        order += generator.sample(chosen, len(chosen))
    rows = [
        {
            "env_class_path": ENV_CLASS_PATH,
            "env_config": dict(env_config or {}),
            "task_data": {"solution": solution, "seed": _task_seed(part, settings["seed"], row)},
        }
        for row, solution in enumerate(order[:size])
    ]
    return dataset_of_rows(rows)


def part_of(secrets: Sequence[str], part: Part, settings: Mapping[str, Any]) -> list[str]:
    """The secrets of training or evaluation; which is which depends on their names alone.

    Raises:
        ConfigError: There are too few secrets to share out.
    """
    if settings["split"] == "all":
        return list(secrets)
    if len(secrets) < 2:
        raise ConfigError(f"split='disjoint' needs at least 2 objects, got {len(secrets)}; split='all' takes any")
    ranked = sorted(secrets, key=lambda name: derive_seed("twenty questions split", name))
    num_eval = min(max(1, math.floor(len(ranked) * settings["eval_fraction"] + 0.5)), len(ranked) - 1)
    kept = set(ranked[:num_eval])
    return [name for name in secrets if (name in kept) == (part == "eval")]


def _task_seed(part: Part, seed: int, row: int) -> int:
    """Even for training, odd for evaluation: the two never meet, whatever the seeds."""
    return derive_seed("twenty questions task", seed, row) // 4 * 2 + (part == "eval")


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"size": None, "seed": 0, "split": "disjoint", "eval_fraction": 0.2}
    unknown = set(options) - set(settings)
    if unknown:
        raise ConfigError(f"dataset options are {', '.join(settings)}, got {', '.join(map(repr, sorted(unknown)))}")
    settings.update(options)
    size, fraction = settings["size"], settings["eval_fraction"]
    if size is not None and not (type(size) is int and size >= 1):
        raise ConfigError(f"size must be a positive int or None, got {size!r}")
    if type(settings["seed"]) is not int:
        raise ConfigError(f"seed must be an int, got {settings['seed']!r}")
    if settings["split"] not in ("disjoint", "all"):
        raise ConfigError(f"split must be 'disjoint' or 'all', got {settings['split']!r}")
    if not (isinstance(fraction, float) and 0 < fraction < 1):
        raise ConfigError(f"eval_fraction must be a float in (0, 1), got {fraction!r}")
    return settings
