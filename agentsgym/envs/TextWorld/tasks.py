"""Create dataset rows, whose tasks are seeds of games to generate or files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.envs.config import COMMON_FIELDS, validated_config
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import (
    COMMON_OPTIONS,
    CommonOptions,
    Part,
    checked_options,
    dataset_of,
    drawn_options,
    names_in_part,
    rows_of,
    task_seed,
)
from agentsgym.envs.TextWorld.kinds import FILES, checked_game_options
from agentsgym.errors import ConfigError
from agentsgym.fields import Field, is_int, is_str, is_strings, or_none
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset


class DatasetOptions(CommonOptions, total=False):
    """Options of the generated rows.

    Attributes:
        size: The number of rows; by default 100 for generated games, or one per file.
        seed: The seed of the generated games, or of the order of the files.
        num_games: The number of different generated games, which the rows cycle through; by default one per row.
        files: A folder, or a list of paths of ``.z8`` files (kind ``files`` only).
        split: ``"disjoint"`` if training and evaluation share no file, ``"all"`` if both use all files (kind ``files``
            only).
        eval_fraction: The fraction of files that ``"disjoint"`` reserves for evaluation, in (0, 1) (kind ``files``
            only).
    """

    num_games: int | None
    files: Any


_FILE_OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "files": Field(
        default=None,
        expected="a folder or a list of paths",
        valid=lambda value: is_str(value) or (is_strings(value) and len(value) > 0),
    ),
}
_GENERATION_OPTIONS: Mapping[str, Field] = {
    **drawn_options(100),
    "num_games": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return rows with the columns ``env_class_path``, ``env_config`` and ``task_data``."""
    config = validated_config(env_config, {**COMMON_FIELDS, **env_class.config_fields}, env_class.default_config)
    checked_game_options(config["kind"], config["options"])
    if config["kind"] == FILES:
        settings = checked_options(options, _FILE_OPTIONS)
        files: Any = settings["files"]
        if isinstance(files, str):
            files = sorted(Path(files).expanduser().rglob("*.z8"))
            if not files:
                raise ConfigError(
                    "files must be a folder of .z8 games or a list of paths, but no .z8 files were found in "
                    f"{shown(settings['files'])}"
                )
        names = names_in_part([*map(str, files)], part, settings, "files")
        return rows_of([{"file": name} for name in names], class_path(env_class), env_config, part, settings)
    settings = checked_options(options, _GENERATION_OPTIONS)
    num_games: int = settings["num_games"] or settings["size"]
    games: list[int] = [task_seed(part, "textworld game", settings["seed"], game) % 2**31 for game in range(num_games)]
    tasks = [
        {"game_seed": games[row % num_games], "seed": task_seed(part, "textworld task", settings["seed"], row)}
        for row in range(settings["size"])
    ]
    return dataset_of(tasks, class_path(env_class), env_config)
