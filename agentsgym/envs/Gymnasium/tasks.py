"""Create dataset rows, whose tasks are seeds, and maps for FrozenLake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.config import validated_config
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import DrawnOptions, Part, checked_options, dataset_of, drawn_options, task_seed
from agentsgym.envs.Gymnasium import SPEC
from agentsgym.envs.Gymnasium.creation import spec_of
from agentsgym.envs.Gymnasium.descriptions import find_description
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import Field, is_bool, is_fraction, is_int
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

if TYPE_CHECKING:
    from datasets import Dataset


_MAX_DRAWS = 1000  # attempts to draw a map for one row
_EVAL_ONE_IN = 5  # one map in five is reserved for evaluation


class DatasetOptions(DrawnOptions, total=False):
    """Options of the generated rows.

    Attributes:
        size: The number of rows; 256 by default.
        seed: The seed from which the tasks' seeds and maps are drawn; 0 by default.
        random_maps: Whether each task has a random map (FrozenLake only). One map in five, chosen by its hash, is
            reserved for evaluation.
        map_size: The number of rows and columns of a random map; 4 by default.
        frozen_probability: The probability that a cell is ice rather than a hole; 0.8 by default.
    """

    random_maps: bool
    map_size: int
    frozen_probability: float


_OPTIONS: Mapping[str, Field] = {
    **drawn_options(256),
    "random_maps": Field(default=False, expected="True or False", valid=is_bool),
    "map_size": Field(default=4, expected="an int >= 2", valid=is_int(2)),
    "frozen_probability": Field(default=0.8, expected="a number in [0, 1]", valid=is_fraction),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return rows with the columns ``env_class_path``, ``env_config`` and ``task_data``."""
    config = validated_config(env_class, env_config)
    env_id = config["id"]
    if callable(env_id):
        raise ConfigError("env_config['id'] must be a registered id, since dataset rows are plain JSON, got a callable")
    spec_of(env_id)
    settings = checked_options(options, _OPTIONS)
    description = find_description(env_id)
    if settings["random_maps"] and not (description and description.has_maps):
        raise ConfigError(f"random_maps=True is only valid for FrozenLake, but env_config['id'] is {shown(env_id)}")
    if not settings["random_maps"] and (unused := sorted({"map_size", "frozen_probability"} & options.keys())):
        raise ConfigError(f"{unused[0]} has no effect without random_maps=True")
    maps = random_maps(part, settings) if settings["random_maps"] else None
    tasks: list[dict[str, Any]] = []
    for row in range(settings["size"]):
        task: dict[str, Any] = {"seed": task_seed(part, "gymnasium task", settings["seed"], row)}
        if maps is not None:
            task["map"] = next(maps)
        tasks.append(task)
    return dataset_of(tasks, class_path(env_class), env_config)


def random_maps(part: Part, settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Draw FrozenLake maps with a reachable goal; the maps for training and evaluation are disjoint.

    Raises:
        ConfigError: None of 1,000 drawn maps belongs to this split, for example because ``frozen_probability`` is 1.
    """
    SPEC.check_installed()
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map  # noqa: PLC0415  # optional dependency

    size, ice = settings["map_size"], settings["frozen_probability"]
    for row in range(settings["size"]):
        for draw in range(_MAX_DRAWS):
            seed = derive_seed("frozen lake map", part, settings["seed"], row, draw)
            desc = generate_random_map(size, ice, seed)
            is_for_evaluation = derive_seed("frozen lake part", desc) % _EVAL_ONE_IN == 0
            if is_for_evaluation == (part == "eval"):
                yield desc
                break
        else:
            raise ConfigError(
                f"no map for the {part} rows was found with map_size={size} and frozen_probability={ice}: too few "
                "different maps exist, so increase map_size or choose a frozen_probability further from 0 and 1"
            )


def check_map(desc: Any) -> None:
    """Check a task's map."""
    rows = [*cast("Sequence[Any]", desc)] if isinstance(desc, list | tuple) else list[Any]()
    is_grid = bool(rows) and all(isinstance(row, str) and row and len(row) == len(rows[0]) for row in rows)
    letters = "".join(rows) if is_grid else ""
    if not is_grid or set(letters) - set("SFHG") or letters.count("S") != 1 or "G" not in letters:
        raise TaskError(
            "task_data['map'] must be a list of strings of equal length, made of the letters S, F, H and G, with one "
            f"S and at least one G, got {shown(cast('object', desc))}"
        )
