"""Make dataset rows from tasks: split, order and seed them; and get an environment's default tasks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from agentsgym.envs.dataset_rows import ConfiguredEnv, class_path
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field, is_int, is_positive_number, one_of, or_none, require
from agentsgym.seeding import derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

    from agentsgym.envs.base import MultistepEnv


#: The split that rows are made for; called part because the option ``split`` has another meaning.
Part = Literal["train", "eval"]
Item = TypeVar("Item")
Env = TypeVar("Env", bound=ConfiguredEnv)


class DrawnOptions(TypedDict, total=False):
    """Options of a dataset whose tasks are sampled on demand.

    Attributes:
        size: Number of rows.
        seed: Random seed of the tasks; training and evaluation tasks never have the same seed.
    """

    size: int
    seed: int


class CommonOptions(TypedDict, total=False):
    """Options of a dataset with a fixed set of tasks.

    Attributes:
        size: Number of rows; by default one per task.
        seed: Random seed of the tasks' order and seeds; it never moves a task between training and evaluation.
        split: Whether the splits share tasks: ``"disjoint"`` (they share none) or ``"all"`` (each has all of them).
        eval_fraction: Fraction of tasks that ``"disjoint"`` reserves for evaluation, in (0, 1).
    """

    size: int | None
    seed: int
    split: str
    eval_fraction: float


SEED_OPTION: Mapping[str, Field] = {"seed": Field(default=0, expected="an int >= 0", valid=is_int(0))}
#: Options of every dataset with a fixed set of tasks: number of rows, order, and evaluation fraction.
COMMON_OPTIONS: Mapping[str, Field] = {
    "size": Field(default=None, expected="a positive int or None", valid=or_none(is_int(1))),
    **SEED_OPTION,
    "split": Field(default="disjoint", expected="'disjoint' or 'all'", valid=one_of("disjoint", "all")),
    "eval_fraction": Field(
        default=0.2, expected="a number in (0, 1)", valid=lambda value: is_positive_number(value) and value < 1
    ),
}


def drawn_options(size: int) -> dict[str, Field]:
    """Return the options of a dataset whose tasks are sampled on demand: ``size``, with this default, and ``seed``."""
    return {"size": Field(default=size, expected="a positive int", valid=is_int(1)), **SEED_OPTION}


def row_env(env_class: Callable[..., Env], env_config: Mapping[str, Any] | None, *keys: str) -> Env:
    """Build the environment of dataset rows, which are plain JSON, so the values of ``keys`` must not be callables."""
    env = env_class(env_config=env_config)
    for key in keys:
        if callable(env.env_config[key]):
            raise ConfigError(
                f"env_config[{key!r}] is a callable, which dataset rows cannot store: pass it to the environment itself"
            )
    return env


def checked_options(
    given: Mapping[str, Any], fields: Mapping[str, Field], owner: str = "the dataset", place: str = "{}"
) -> dict[str, Any]:
    """Check the options of a dataset, or of another ``owner``, and fill in their defaults.

    >>> checked_options({"sise": 3}, drawn_options(100))
    Traceback (most recent call last):
    agentsgym.errors.ConfigError: the dataset has no option 'sise'; did you mean 'size'?
    """
    for name in given:
        if name not in fields:
            raise ConfigError(f"{owner} has no option {name!r}{did_you_mean(name, fields)}")
    settings = {name: field.default for name, field in fields.items()} | dict(given)
    for name, field in fields.items():
        require(place.format(name), settings[name], field.valid, field.expected)
    return settings


def names_in_part(
    names: Sequence[str], part: Part, settings: Mapping[str, Any], things: str, *, topic: str | None = None
) -> list[str]:
    """Return the names in the training or evaluation split, which depends only on the names and ``topic``.

    Args:
        names: All names, possibly with repetitions.
        part: The split to return.
        settings: The checked options, including ``split`` and ``eval_fraction``.
        things: Plural name of the items in error messages.
        topic: Salt that makes the splits of different environments independent; ``things`` by default.
    """
    if settings["split"] == "all":
        return list(names)
    distinct = sorted({*names}, key=lambda name: derive_seed(f"{topic or things} split", name))
    if len(distinct) < 2:
        raise ConfigError(f"split='disjoint' needs at least 2 different {things}, got {len(distinct)}: use split='all'")
    num_eval = min(max(1, math.floor(len(distinct) * settings["eval_fraction"] + 0.5)), len(distinct) - 1)
    kept = set(distinct[:num_eval])
    return [name for name in names if (name in kept) == (part == "eval")]


def rows_of(
    tasks: Sequence[Mapping[str, Any]],
    env_class: type,
    env_config: Mapping[str, Any] | None,
    part: Part,
    settings: Mapping[str, Any],
) -> Dataset:
    """Make ``size`` rows (by default one per task), shuffled by ``seed``; tasks occur equally often, to within one.

    Task seeds are even for training and odd for evaluation, so the two never share a seed.

    Raises:
        ConfigError: A task or ``env_config`` is not plain JSON.
    """
    env_class_path = class_path(env_class)
    generator = random.Random(derive_seed("rows", env_class_path, part, settings["seed"]))
    order = shuffled(tasks, settings["size"], generator)
    seeds = (task_seed(part, "task", env_class_path, settings["seed"], index) for index in range(len(order)))
    seeded = [{**task, "seed": seed} for task, seed in zip(order, seeds, strict=True)]
    return dataset_of(seeded, env_class_path, env_config)


def shuffled(items: Sequence[Item], size: int | None, generator: random.Random) -> list[Item]:
    """Return ``size`` items (by default all) in random order; items occur equally often, to within one."""
    count = len(items) if size is None else size
    order: list[Item] = []
    while len(order) < count:
        order += generator.sample(items, len(items))
    return order[:count]


def drawn_dataset(
    env_class: Any, env_config: dict[str, Any] | None, part: Part, options: Mapping[str, Any], **own: Field
) -> Dataset:
    """Make a dataset of the tasks that an environment's ``tasks(count, seed=…, part=…)`` draws, 1000 by default.

    ``own`` describes further options, which ``tasks`` accepts as well.

    Raises:
        ConfigError: The configuration or an option is invalid.
    """
    settings = checked_options(options, {**drawn_options(1000), **own})
    tasks = env_class(env_config=env_config).tasks(settings.pop("size"), part=part, **settings)
    return dataset_of(tasks, class_path(env_class), env_config)


def dataset_of(
    tasks: Iterable[Mapping[str, Any]], env_class_path: str, env_config: Mapping[str, Any] | None
) -> Dataset:
    """Make one dataset row per task of an environment, in order.

    Raises:
        ConfigError: A task or ``env_config`` is not plain JSON.
    """
    config = dict(env_config or {})
    return dataset_of_rows(
        {"env_class_path": env_class_path, "env_config": config, "task_data": dict(task)} for task in tasks
    )


def dataset_of_rows(rows: Iterable[Mapping[str, Any]], *names: str) -> Dataset:
    """Make a dataset of rows; ``env_config`` and ``task_data`` are JSON columns, so rows may have different keys.

    Other columns are JSON, too, except those of strings (``names``); they are None where missing.
    """
    from datasets import Dataset, Features, Json, Value  # noqa: PLC0415  # the import takes half a second, and playing does not need it

    listed = [dict(row) for row in rows]
    try:
        json.dumps(listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tasks and env_config of dataset rows must be plain JSON: {error}") from error
    columns: dict[str, Any] = {"env_class_path": Value("string"), "env_config": Json(), "task_data": Json()}
    columns |= dict.fromkeys(names, Value("string"))
    columns |= {key: Json() for row in listed for key in row if key not in columns}
    filled = [{key: row.get(key) for key in columns} for row in listed]
    return Dataset.from_list(filled, features=Features(columns))  # pyright: ignore[reportUnknownMemberType]


def task_seed(part: Part, *key: Hashable) -> int:
    """Derive a task's seed from ``key``: even for training, odd for evaluation."""
    return derive_seed(*key) // 4 * 2 + (part == "eval")


def tasks_of(
    env: MultistepEnv, split: Literal["train", "eval"] | str, options: Mapping[str, Any], most: int, *, seed: int = 0
) -> list[Any]:
    """Return rows of the environment's dataset; for a class without one, tasks that contain only a seed.

    Args:
        env: The environment.
        split: ``"train"`` or ``"eval"``.
        options: Options for its dataset.
        most: The maximum number of tasks.
        seed: Random seed of the tasks that contain only a seed.
    """
    make: Any = env.get_train_dataset if split == "train" else env.get_eval_dataset
    try:
        return list(islice(_rows(env, make, options, most), most))  # a generator may raise at its first row
    except NotImplementedError:
        if options:
            raise ConfigError(
                f"{type(env).__name__} has no dataset, hence no options, got {', '.join(options)}"
            ) from None
    return [{"seed": derive_seed("command line", split, seed, index)} for index in range(most)]


def _rows(env: MultistepEnv, make: Any, options: Mapping[str, Any], most: int) -> Any:
    """Create the dataset, of no more rows than needed if it accepts a size."""
    if "size" not in options:
        with suppress(TypeError):  # a user-defined class may not accept size
            return make(**{"size": most, **options})
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"the dataset of {type(env).__name__} cannot be created: {error}") from error
