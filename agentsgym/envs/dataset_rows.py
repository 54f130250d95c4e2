"""Read dataset rows: the environment class, the configuration and the task of a row."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Protocol, cast

from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.errors import ConfigError, TaskError, did_you_mean
from agentsgym.fields import Field, is_dict, require
from agentsgym.texts import sentence_of, shortened, shown

DatasetRow = Mapping[str, Any]
TaskData = Mapping[str, Any]

ROW_COLUMNS = ("env_class_path", "env_config", "task_data")
_registered: dict[str, type[Any]] = {}

_ABSENT = object()
_MAX_SHOWN = 200
_REMEDY = "create the row's environment with agentsgym.make(row, tokenizer)"


class ConfiguredEnv(Protocol):
    """The members of an environment that are used to read a row; see :class:`~agentsgym.envs.base.MultistepEnv`."""

    config_fields: ClassVar[Mapping[str, Field]]
    default_config: ClassVar[Mapping[str, Any]]
    tokenizer: Any
    env_config: dict[str, Any]
    given_config: dict[str, Any]


def registered_classes() -> dict[str, type[Any]]:
    """Return the registered classes by ``env_class_path``; ``agentsgym.register`` adds to this dict."""
    return _registered


def class_path(env_class: type) -> str:
    """The ``env_class_path`` of a class: the path it was registered under, or else its module and name."""
    for path, known in _registered.items():
        if known is env_class:
            return path
    package, _, module = env_class.__module__.rpartition(".")
    if module == "env" and package.startswith("agentsgym.envs.") and hasattr(sys.modules[package], env_class.__name__):
        return f"{package}.{env_class.__name__}"  # the folder of a packaged environment hands it on
    return f"{env_class.__module__}.{env_class.__name__}"


def drop_null_columns(config: DatasetRow, env_class: type[Any]) -> dict[str, Any]:
    """Drop None values that are invalid for the class: tables fill in None for keys of other rows."""
    fields: dict[str, Field] = {**COMMON_FIELDS, **env_class.config_fields}
    return {
        key: value for key, value in config.items() if value is not None or (key in fields and fields[key].valid(None))
    }


def plain_part(config: Any) -> dict[str, Any] | None:
    """Copy the JSON values of a configuration; None if it is not a mapping."""
    if not isinstance(config, Mapping):
        return None
    given = cast("Mapping[str, Any]", config)
    try:
        return {key: copy.deepcopy(value) for key, value in given.items() if _as_json(value) is not None}
    except RecursionError:
        return {}  # it is nested too deeply, which the constructor reports


def tasks_of_rows(env: ConfiguredEnv, rows: Any, name: str = "task_data_list") -> list[dict[str, Any]]:
    """Return the task of each row; an entry that is a task is returned unchanged.

    Args:
        env: The environment that plays the tasks.
        rows: Unchecked user data: ``task_data`` dicts, or dataset rows with a ``task_data`` column.
        name: The name of ``rows`` in errors.

    Raises:
        TaskError: ``rows`` is not a list or is empty, or an entry is neither a task nor a row with a task.
        ConfigError: A row belongs to another class or configuration than ``env``.
    """
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        text = shown(cast("object", rows), 3 * _MAX_SHOWN).replace("\\n", " ")  # a dataset's repr has several lines
        given = shortened(" ".join(text.split()), _MAX_SHOWN, tail=0)
        raise TaskError(f"{name} must be a list of task_data dicts, got {given}{_remedy_of_mapping(rows)}")
    checked: set[str] = set()
    tasks = [_task(env, row, f"{name}[{index}]", checked) for index, row in enumerate(cast("Iterable[Any]", rows))]
    if not tasks:
        raise TaskError(f"{name} must contain at least one task, got an empty list")
    return tasks


def _remedy_of_mapping(rows: Any) -> str:
    """Describe the remedy for a dict of columns or of dataset splits; empty for anything else."""
    parts: dict[Any, Any] = dict(cast("Mapping[Any, Any]", rows)) if isinstance(rows, Mapping) else {}
    if parts and all(hasattr(part, "column_names") for part in parts.values()):
        return f": pass one of its splits, as in dataset[{shown(next(iter(parts)))}]"
    if parts and all(isinstance(part, list) for part in parts.values()):
        return ": a slice of a dataset is a dict of its columns; for its first rows, write dataset.select(range(2))"
    return ""


def _task(env: ConfiguredEnv, row: Any, name: str, checked: set[str]) -> dict[str, Any]:
    require(name, row, is_dict, "a task_data dict or a dataset row", TaskError)
    fields = dict(cast("Mapping[str, Any]", row))
    if not any(column in fields for column in ROW_COLUMNS):
        return fields
    task = fields.get("task_data")
    if not isinstance(task, Mapping):
        given = shown(task) if "task_data" in fields else f"the columns {shown(sorted(map(str, fields)))}"
        raise TaskError(f"{name} is a dataset row and must have a 'task_data' (a dict), got {given}")
    # The rows of a dataset usually share one configuration, so each distinct one is checked once.
    key = environment_key(fields)
    if key not in checked:
        check_row(env, fields, name)
        checked.add(key)
    check_task_keys(task, f"{name}['task_data']", None)
    return dict(cast("Mapping[str, Any]", task))


def environment_key(row: DatasetRow) -> str:
    """Return a key that is equal for rows with equal classes and configurations, valid or not."""
    path = row.get("env_class_path")
    given = [path, row.get("env_type") if path is None else None, row.get("env_config")]
    try:
        return json.dumps(given, sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError):
        return shown(given, 10_000)


def check_row(env: ConfiguredEnv, row: DatasetRow, name: str = "a dataset row", *, remedy: str = _REMEDY) -> None:
    """Reject a row for a different environment than ``env``; a row that does not name an environment is accepted."""
    path, own_path = row.get("env_class_path"), class_path(type(env))
    if path is not None and path != own_path:
        raise ConfigError(f"{name} is for the environment {shown(path)}, but this environment is {own_path!r}")
    if path is None:
        _check_env_type(row.get("env_type"), type(env), name)
    config = row.get("env_config")
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name} must have a dict or None as its 'env_config', got {shown(config)}")
    built_from = shown(cast("object", env.given_config))
    given = shown(cast("object", config))
    refusal = f"{name} has the env_config {given}, but the environment was created with {built_from}: {remedy}"
    try:
        is_configured = _is_configured(env, cast("DatasetRow", config))
    except ConfigError as error:
        raise ConfigError(f"{name} has an invalid env_config: {sentence_of(error)}") from error
    except Exception as error:  # from the user's constructor, which may need more arguments
        raise ConfigError(refusal) from error
    if not is_configured:
        raise ConfigError(refusal)


def _check_env_type(env_type: Any, env_class: type[Any], name: str) -> None:
    """Reject the name of another environment in ``env_type``, by which other libraries choose the environment."""
    path = class_path(env_class)
    names = {env_class.__name__, env_class.__name__.removesuffix("Env"), path, *path.split(".")[-2:-1]}
    if isinstance(env_type, str) and env_type.casefold() not in map(str.casefold, names):
        raise ConfigError(
            f"{name} has the env_type {shown(env_type)}, but this environment is {path!r}: name another environment in "
            "env_class_path and leave env=None, or remove the column"
        )


def _is_configured(env: ConfiguredEnv, row_config: DatasetRow) -> bool:
    """Whether the row's configuration results in the environment's configuration.

    A second environment is created for the comparison only if the result cannot be predicted, since that may be slow.
    """
    fields: dict[str, Field] = {**COMMON_FIELDS, **type(env).config_fields}
    config = drop_null_columns(row_config, type(env))
    if _are_equal(config, env.given_config):
        return True
    is_predictable = _is_taken_as_given(env, fields) and env.given_config.keys() <= config.keys()
    if is_predictable and all(key in fields and fields[key].valid(value) for key, value in config.items()):
        return all(_are_equal(env.env_config[key], value) for key, value in config.items())
    build: Any = type(env)
    other: ConfiguredEnv = build(env.tokenizer, config)
    # A row is JSON, so it cannot contain a callable of the environment.
    is_equal = all(
        _are_equal(other.env_config.get(key, _ABSENT), value) or (_as_json(value) is None and key not in config)
        for key, value in env.env_config.items()
    )
    interpreted = _interpreted_keys(env) | _interpreted_keys(other)
    return is_equal and all(
        _are_equal(env.given_config.get(key, _ABSENT), other.given_config.get(key, _ABSENT)) for key in interpreted
    )


def _is_taken_as_given(env: ConfiguredEnv, fields: Mapping[str, Field]) -> bool:
    """Whether ``env_config`` is just the given configuration with defaults, unchanged by any constructor."""
    defaults = {key: field.default for key, field in fields.items()}
    expected = {**defaults, **type(env).default_config, **env.given_config}
    return env.given_config.keys() <= env.env_config.keys() and all(
        _as_json(value) is None or _are_equal(expected.get(key, _ABSENT), value)
        for key, value in env.env_config.items()
    )


def _interpreted_keys(env: ConfiguredEnv) -> set[str]:
    """The keys of the given configuration that a constructor removed or changed."""
    return {key for key, value in env.given_config.items() if not _are_equal(env.env_config.get(key, _ABSENT), value)}


def _are_equal(one: Any, other: Any) -> bool:
    if one is _ABSENT or other is _ABSENT:
        return one is other
    text = _as_json(one)
    return one == other or (text is not None and text == _as_json(other))  # tuples become lists in a row


def _as_json(value: Any) -> str | None:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def check_task_keys(task_data: Any, name: str, task_fields: Collection[str] | None) -> None:
    """Reject an invalid task: not a dict, a dataset row instead of a task, or a dict with unknown keys.

    Args:
        task_data: The task, unchecked user data.
        name: The task's name in errors.
        task_fields: The valid keys in addition to ``seed``; None for any.
    """
    require(name, task_data, is_dict, "a dict", TaskError)
    given = {key for key, value in cast("TaskData", task_data).items() if value is not None}  # tables fill in None
    columns = [column for column in ROW_COLUMNS if column in given]
    if columns:
        raise TaskError(
            f"{name} must be a task, got a dict with {shown(columns[0])}, which is a column of a dataset row"
        )
    known = given if task_fields is None else {"seed", *task_fields}
    unknown = sorted(map(str, given - known))
    if unknown:
        raise TaskError(f"{name}[{shown(unknown[0])}] is unknown{did_you_mean(unknown[0], known)}")
