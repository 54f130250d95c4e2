"""Build the environment that a dataset row names, from registered classes only: a dataset must not import code."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from agentsgym.envs import PACKAGED
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.dataset_rows import DatasetRow, class_path, drop_null_columns, registered_classes
from agentsgym.envs.spec import installed_entry_points
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def register(env_class: type[MultistepEnv], path: str | None = None) -> type[MultistepEnv]:
    """Register an environment class so that dataset rows can name it; usable as a decorator.

    Args:
        env_class: The class to register.
        path: Its ``env_class_path``; by default its module and name.

    Raises:
        ConfigError: ``env_class`` is not an environment class, or another class is registered under that path.
    """
    if not (isinstance(env_class, type) and issubclass(env_class, MultistepEnv)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"env_class must be a subclass of MultistepEnv, got {shown(env_class)}")
    key = path or class_path(env_class)
    if registered_classes().get(key, env_class) is not env_class or key in PACKAGED.values():
        raise ConfigError(f"env_class_path {shown(key)} is already registered for another class")
    registered_classes()[key] = env_class
    return env_class


def find(path: str, *, allow_import: bool = False) -> type[MultistepEnv]:
    """Return the class that ``path`` names.

    Args:
        path: An ``env_class_path``.
        allow_import: Whether to import a path that is not registered; only for datasets that you trust like code.

    Raises:
        ConfigError: The path is unknown, or does not name an environment.
    """
    if path in registered_classes():
        return registered_classes()[path]
    if path in PACKAGED.values() or allow_import:
        module, _, name = path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: no absolute module name
            raise ConfigError(f"env_class_path {shown(path)} cannot be imported: {sentence_of(error)}") from error
        return _check_class(path, found)
    entry_points = installed_entry_points()
    for name, entry in entry_points.items():
        if path in {name, entry.value.replace(":", ".")}:  # the environment's own rows contain the latter
            return _check_class(path, entry.load())
    known = {*PACKAGED.values(), *registered_classes(), *entry_points}
    raise ConfigError(
        f"env_class_path {shown(path)} is not registered{did_you_mean(path, known)}"
        " (register your own class with agentsgym.register, or import one that you trust with allow_import=True)"
    )


def make(
    row: DatasetRow | str, tokenizer: PreTrainedTokenizerBase | None = None, *, allow_import: bool = False
) -> MultistepEnv:
    """Build the environment that a dataset row (or just an ``env_class_path``) names.

    The task is not checked: a row without ``task_data`` is rejected only when it is played.

    Raises:
        ConfigError: The row has no ``env_class_path``, or the path or ``env_config`` is invalid.
    """
    if isinstance(row, str):
        row = {"env_class_path": row}
    if not isinstance(row, Mapping) or not isinstance(row.get("env_class_path"), str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a row must be a dict with an 'env_class_path' (str), got {shown(row)}")
    env_class = find(row["env_class_path"], allow_import=allow_import)
    config = row.get("env_config")
    is_dict = isinstance(config, Mapping)
    return env_class(tokenizer, drop_null_columns(cast("DatasetRow", config), env_class) if is_dict else config)


def _check_class(path: str, found: object) -> type[MultistepEnv]:
    if isinstance(found, type) and issubclass(found, MultistepEnv):
        return found
    raise ConfigError(
        f"env_class_path {shown(path)} must name a subclass of MultistepEnv, got {shown(cast('object', found))}"
    )
