"""Mix the tasks of several environments into one dataset in which every prefix contains each one's share.

::

    {"math": (MathEnv, config), "lake": rows, …} ─▶ schedule (next source) ─▶ rows with the column "environment"
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterable, Mapping, Sequence, Sized
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import ROW_COLUMNS, check_task_keys, class_path, plain_part
from agentsgym.envs.datasets.environments import find, register
from agentsgym.envs.datasets.options import dataset_of_rows, shuffled
from agentsgym.errors import AgentsGymError, ConfigError, did_you_mean
from agentsgym.fields import is_dict, is_int, is_positive_number, is_str, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

#: The column that contains the name of a row's source; metrics are grouped by it.
LABEL_COLUMN = "environment"
Row = dict[str, Any]
_SHAPES = (
    "dataset rows, an environment, its class, or a tuple (class, env_config) or (class, env_config, tasks or options)"
)


def mix(
    sources: Mapping[str, Any],
    *,
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    size: int | None = None,
    split: Literal["train", "eval"] = "train",
) -> Dataset:
    """Mix tasks of several environments into one dataset.

    The order of sources is scheduled, not drawn: with W the sum of the weights, the first t rows contain
    ``t · weight / W`` rows of each source to within 1, and any contiguous range of rows has its share to within 2
    (Tijdeman 1980, "The chairman assignment problem"). The rows of each source are shuffled, and all of them are used
    before any is repeated.

    The trainer shuffles its rows unless ``GRPOEnvConfig(shuffle_dataset=False)`` is set; if
    shuffled, the shares hold over an epoch, not in each batch.

    Args:
        sources: A dict from the name of a source to one of the following: rows (a dataset or a list of dicts with
            ``env_class_path`` and ``task_data``); an environment or a class, whose default tasks are used; ``(class,
            env_config)``; ``(class, env_config, tasks)`` with a list of ``task_data``; ``(class, env_config, options)``
            with a dict of keyword arguments for ``get_train_dataset``. Classes are registered if necessary.
        weights: A positive number for each source; None for equal shares.
        seed: Random seed of the order of each source's rows and of tie-breaking in the schedule.
        size: Number of rows; None for the total number of rows in the sources.
        split: Split of the environments' default tasks.

    Returns:
        Rows with ``env_class_path``, ``env_config`` and ``task_data``, with the name of the source as ``environment``
        (``"outer/inner"`` if a source is itself a mixture). Other columns are kept; they are None where missing.

    Raises:
        ConfigError: There are no sources; a source is empty, has an invalid form or values that rows cannot store; or
            a weight, an option or a key of ``env_config`` is invalid.
    """
    require("size", size, or_none(is_int(1)), "a positive int or None")
    require("seed", seed, lambda value: type(value) is int, "an int")
    require("split", split, lambda value: value in ("train", "eval"), "'train' or 'eval'")
    require("sources", sources, lambda given: is_dict(given) and given, "a non-empty dict of sources by name")
    for name in sources:
        require("a source's name", name, lambda it: it and is_str(it) and "/" not in it, "a non-empty str without '/'")
    integers = _integer_weights(sources, weights)
    rows = {name: _checked_rows(name, source, split) for name, source in sources.items()}
    count = sum(map(len, rows.values())) if size is None else size
    generators = {name: random.Random(derive_seed("mix rows", seed, name)) for name in rows}
    waiting = {name: iter(shuffled(own, count, generators[name])) for name, own in rows.items()}
    ranked = sorted(rows, key=lambda name: derive_seed("mix", seed, name))
    mixed = [next(waiting[ranked[index]]) for index in schedule([integers[name] for name in ranked], count)]
    return dataset_of_rows(mixed, LABEL_COLUMN)


def schedule(weights: Sequence[int], count: int) -> list[int]:
    """Choose the source of each row so that every prefix contains each source's share to within 1.

    Tijdeman's rule: of the sources that may come now, choose the one with the earliest deadline. With N sources, W the
    sum of their weights, and c the number of earlier rows from a source of weight w, the source may come at row t once
    ``w·t/W - c >= 1 / (2N - 2)``, and must come before ``w·t/W - c`` exceeds ``1 - 1 / (2N - 2)``.

    Args:
        weights: Positive weights of the sources, (N,).
        count: Number of rows.

    Returns:
        Indices of sources, (count,).

    >>> schedule([2, 1, 1], 8)
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    if len(weights) == 1:
        return [0] * count
    total, parts = sum(weights), 2 * len(weights) - 2
    taken = [0] * len(weights)
    order: list[int] = []
    for place in range(1, count + 1):
        _, chosen = min(
            (-((1 - parts * (num + 1)) * total // (parts * weight)), i)  # the first row that would be too late
            for i, (weight, num) in enumerate(zip(weights, taken, strict=True))
            if parts * (weight * place - num * total) >= total
        )
        taken[chosen] += 1
        order.append(chosen)
    return order


def _integer_weights(sources: Mapping[str, Any], weights: Any) -> dict[str, int]:
    """Return integer weights in exactly the same proportions."""
    if weights is None:
        return dict.fromkeys(sources, 1)
    require("weights", weights, is_dict, "a dict with one number per source")
    given = cast("Mapping[str, Any]", weights)
    for name in given:
        if name not in sources:
            raise ConfigError(f"weights has the key {shown(name)}, which is not a source{did_you_mean(name, sources)}")
    for name in sources:
        if name not in given:
            raise ConfigError(f"weights has no weight for the source {shown(name)}")
        require(f"weights[{name!r}]", given[name], is_positive_number, "a number above 0; omit unused sources")
    exact = {name: Fraction(given[name]) for name in sources}
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    return {name: int(weight * scale) for name, weight in exact.items()}


def _checked_rows(name: str, source: Any, split: str) -> list[Row]:
    try:
        rows = _rows_of_source(source, split)
        checked = [_checked_row(name, row, f"row {index}") for index, row in enumerate(rows)]
    except NotImplementedError as error:  # an environment without default tasks
        raise ConfigError(f"the source {name!r} has no tasks: pass rows, or (class, env_config, tasks)") from error
    except AgentsGymError as error:
        raise ConfigError(f"the source {name!r} is invalid: {sentence_of(error)}") from error
    if not checked:
        raise ConfigError(f"the source {name!r} must contain at least one row, got none")
    return checked


def _rows_of_source(source: Any, split: str) -> Iterable[Any]:
    if isinstance(source, MultistepEnv):
        parts: list[str] = vars(source)["_unstorable_args"]
        if parts:
            raise ConfigError(
                f"the environment was built with {', '.join(parts)}, which cannot be stored in a dataset row: build it "
                "from JSON values only, or pass a subclass that creates these itself"
            )
        return _default_tasks(type(source), source.given_config, {}, split)
    if _is_environment_class(source):
        return _default_tasks(source, {}, {}, split)
    if isinstance(source, tuple):
        return _rows_of_tuple(cast("tuple[Any, ...]", source), split)
    if isinstance(source, str | Mapping) or not isinstance(source, Sized) or not isinstance(source, Iterable):
        raise ConfigError(f"a source must be {_SHAPES}; got {shown(cast('object', source))}")
    return cast("Iterable[Any]", source)


def _rows_of_tuple(source: tuple[Any, ...], split: str) -> Iterable[Any]:
    env_class: Any
    env_class, config, third = (*source, None, None, None)[:3]
    if not _is_environment_class(env_class) or len(source) > 3 or not isinstance(config, Mapping | None):
        raise ConfigError(f"a source must be {_SHAPES}; got {shown(source)}")
    if third is None or isinstance(third, Mapping):
        return _default_tasks(env_class, cast("Any", config) or {}, cast("Any", third) or {}, split)
    if isinstance(third, str) or not isinstance(third, Iterable):
        raise ConfigError(f"a source's third item must be a list of task_data or a dict of options, got {shown(third)}")
    row = {"env_class_path": _registered_path(env_class), "env_config": _plain(cast("Any", config) or {})}
    try:
        env_class(None, {**cast("Row", row["env_config"])})  # checks env_config
    except AgentsGymError:
        raise
    except Exception:  # a user-defined constructor may need a tokenizer
        logger.debug("%s cannot be built without a tokenizer to check env_config", env_class, exc_info=True)
    return [{**row, "task_data": task} for task in cast("Iterable[Any]", third)]


def _is_environment_class(value: Any) -> TypeGuard[type[MultistepEnv]]:
    return isinstance(value, type) and issubclass(value, MultistepEnv)


def _default_tasks(
    env_class: type[MultistepEnv], config: Mapping[str, Any], options: Mapping[str, Any], split: str
) -> Iterable[Any]:
    _registered_path(env_class)
    make = env_class.get_train_dataset if split == "train" else env_class.get_eval_dataset
    return make(_plain(config), **options)


def _plain(config: Mapping[str, Any]) -> Row:
    plain = plain_part(config) or {}
    for key in config:
        if key not in plain:
            raise ConfigError(
                f"env_config[{key!r}] must be a JSON value to be stored in a dataset row, got {shown(config[key])}"
            )
    return plain


def _registered_path(env_class: type[MultistepEnv]) -> str:
    path = class_path(env_class)
    try:
        known = find(path)
    except ConfigError:
        known = register(env_class)
    if known is not env_class:
        raise ConfigError(f"env_class_path {shown(path)} is already registered for another class")
    return path


def _checked_row(source: str, row: Any, name: str) -> Row:
    require(name, row, is_dict, "a dict")
    fields: Row = dict(cast("Mapping[str, Any]", row))
    path, config = fields.get("env_class_path"), fields.get("env_config")
    if not isinstance(path, str):
        raise ConfigError(
            f"{name} has no 'env_class_path' (it has {shown(sorted(map(str, fields)))}): if all tasks belong to one "
            "class, pass (class, env_config, tasks)"
        )
    try:
        json.dumps(fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} contains a value that JSON cannot represent: {sentence_of(error)}") from error
    find(path)
    if not isinstance(config, Mapping | None):
        raise ConfigError(f"{name} must have a dict or None as its 'env_config', got {shown(config)}")
    check_task_keys(fields.get("task_data"), f"{name}['task_data']", None)
    inner = fields.get(LABEL_COLUMN)
    own = {"env_class_path": path, "env_config": dict(cast("Any", config) or {}), "task_data": fields["task_data"]}
    others = {key: value for key, value in fields.items() if key not in (*ROW_COLUMNS, LABEL_COLUMN)}
    return {**own, LABEL_COLUMN: f"{source}/{inner}" if isinstance(inner, str) else source, **others}
