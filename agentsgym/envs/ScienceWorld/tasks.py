"""The tasks of ScienceWorld, their variations, and dataset rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from agentsgym.envs.config import COMMON_FIELDS, validated_config
from agentsgym.envs.dataset_rows import class_path
from agentsgym.envs.datasets.options import SEED_OPTION, Part, checked_options, rows_of
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field, is_int, is_strings, one_of, or_none

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, slots=True)
class Variations:
    """The number of variations in each split of a task; their indices are in the order train, dev, test."""

    train: int
    dev: int
    test: int

    def indices(self, split: str) -> range:
        """Return the indices of a split: ``"train"``, ``"dev"`` or ``"test"``."""
        ends = {"train": (0, self.train), "dev": (self.train, self.train + self.dev)}
        first, stop = ends.get(split, (self.train + self.dev, self.num))
        return range(first, stop)

    @property
    def num(self) -> int:
        """The total number of variations."""
        return self.train + self.dev + self.test


#: The splits of ScienceWorld 1.2.3.
TASKS: Mapping[str, Variations] = {
    "boil": Variations(14, 7, 9),
    "change-the-state-of-matter-of": Variations(14, 7, 9),
    "chemistry-mix": Variations(16, 8, 8),
    "chemistry-mix-paint-secondary-color": Variations(18, 9, 9),
    "chemistry-mix-paint-tertiary-color": Variations(18, 9, 9),
    "find-animal": Variations(150, 75, 75),
    "find-living-thing": Variations(150, 75, 75),
    "find-non-living-thing": Variations(150, 75, 75),
    "find-plant": Variations(150, 75, 75),
    "freeze": Variations(14, 7, 9),
    "grow-fruit": Variations(62, 31, 33),
    "grow-plant": Variations(62, 31, 33),
    "identify-life-stages-1": Variations(6, 3, 5),
    "identify-life-stages-2": Variations(4, 2, 4),
    "inclined-plane-determine-angle": Variations(84, 42, 42),
    "inclined-plane-friction-named-surfaces": Variations(692, 346, 348),
    "inclined-plane-friction-unnamed-surfaces": Variations(80, 40, 42),
    "lifespan-longest-lived": Variations(62, 31, 32),
    "lifespan-longest-lived-then-shortest-lived": Variations(62, 31, 32),
    "lifespan-shortest-lived": Variations(62, 31, 32),
    "measure-melting-point-known-substance": Variations(218, 109, 109),
    "measure-melting-point-unknown-substance": Variations(150, 75, 75),
    "melt": Variations(14, 7, 9),
    "mendelian-genetics-known-plant": Variations(60, 30, 30),
    "mendelian-genetics-unknown-plant": Variations(240, 120, 120),
    "power-component": Variations(10, 5, 5),
    "power-component-renewable-vs-nonrenewable-energy": Variations(10, 5, 5),
    "test-conductivity": Variations(450, 225, 225),
    "test-conductivity-of-unknown-substances": Variations(300, 150, 150),
    "use-thermometer": Variations(270, 135, 135),
}


class DatasetOptions(TypedDict, total=False):
    """Options of the generated rows.

    Attributes:
        tasks: Names from :data:`TASKS`; None for all tasks.
        num_variations: The maximum number of variations per task, so that no task dominates; None for all.
        split: The split for evaluation, ``"dev"`` (default) or ``"test"``.
        size: The number of rows; by default one per variation.
        seed: The seed that determines the order of rows and the tasks' seeds.
    """

    tasks: Sequence[str] | None
    num_variations: int | None
    split: str
    size: int | None
    seed: int


_OPTIONS: Mapping[str, Field] = {
    "tasks": Field(default=None, expected="a list of task names or None", valid=or_none(is_strings)),
    "num_variations": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    "size": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    **SEED_OPTION,
}
_SPLIT = Field(default="dev", expected="'dev' or 'test'", valid=one_of("dev", "test"))


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Return rows of the training variations, or of the development or test variations."""
    validated_config(env_config, {**COMMON_FIELDS, **env_class.config_fields}, env_class.default_config)
    settings = checked_options(options, _OPTIONS if part == "train" else {**_OPTIONS, "split": _SPLIT})
    names: Sequence[str] = [*TASKS] if settings["tasks"] is None else settings["tasks"]
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"tasks must be names of ScienceWorld tasks, got {name!r}{did_you_mean(name, TASKS)}")
    if not names:
        raise ConfigError("tasks must name at least one of ScienceWorld's tasks, got []")
    limit, split = settings["num_variations"], settings.get("split", "train")
    tasks = [{"task": name, "variation": index} for name in names for index in TASKS[name].indices(split)[:limit]]
    return rows_of(tasks, class_path(env_class), env_config, part, settings)
