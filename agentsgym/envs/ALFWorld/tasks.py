"""Create dataset rows, whose tasks are the games of a split of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentsgym.envs.ALFWorld.games import SPLITS, TASK_TYPES, data_folder, find_games
from agentsgym.envs.config import COMMON_FIELDS, validated_config
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import SEED_OPTION, Part, checked_options, rows_of
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, is_int, is_str, is_strings, or_none

if TYPE_CHECKING:
    from typing import TypedDict

    from datasets import Dataset

    class DatasetOptions(TypedDict, total=False):
        """Options of the generated rows.

        Attributes:
            split: ``"train"``, ``"eval_in_distribution"`` or ``"eval_out_of_distribution"``, or the name of a split's
                folder, such as ``"valid_seen"``. The default is ``"train"`` for training, and
                ``"eval_out_of_distribution"`` for evaluation.
            task_types: A subset of the six task types; None for all.
            size: The number of rows; by default one per game.
            seed: The seed that determines the order of games and the tasks' seeds.
        """

        split: str
        task_types: list[str] | None
        size: int | None
        seed: int


_OPTIONS: Mapping[str, Field] = {
    **SEED_OPTION,
    "size": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "split": Field(default=None, expected=f"one of {', '.join(map(repr, SPLITS))}", valid=or_none(is_str)),
    "task_types": Field(
        default=None,
        expected=f"a non-empty list of names from {', '.join(map(repr, TASK_TYPES))}, or None",
        valid=or_none(lambda value: is_strings(value) and len(value) > 0 and {*value} <= {*TASK_TYPES}),
    ),
}
_DEFAULT_SPLIT: Mapping[Part, str] = {"train": "train", "eval": "eval_out_of_distribution"}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return the rows of a split."""
    config = validated_config(env_config, {**COMMON_FIELDS, **env_class.config_fields}, env_class.default_config)
    settings = checked_options(options, _OPTIONS)
    split = settings["split"] or _DEFAULT_SPLIT[part]
    wanted = settings["task_types"] or TASK_TYPES
    found = find_games(data_folder(config["data"]), split)
    tasks = [task for task in found if task["task_type"] in wanted]
    if not tasks:
        raise ConfigError(f"the split {split!r} has no game with one of the task types {', '.join(wanted)}")
    return rows_of(tasks, class_path(env_class), env_config, part, settings)
