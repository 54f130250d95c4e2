"""From a dataset row to its environment: only registered classes, since a dataset must not be able to import code."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

ENTRY_POINT_GROUP = "agentsgym.envs"
_BUILT_IN = {"agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv"}
_registered: dict[str, type[MultistepEnv]] = {}


def class_path(env_class: type[MultistepEnv]) -> str:
    """The key under which rows name a class: the path it was registered with, else module and name."""
    for path, known in _registered.items():
        if known is env_class:
            return path
    package, _, module = env_class.__module__.rpartition(".")
    folder = f"{package}.{env_class.__name__}"
    return folder if module == "env" and folder in _BUILT_IN else f"{env_class.__module__}.{env_class.__name__}"


def register(env_class: type[MultistepEnv], path: str | None = None) -> type[MultistepEnv]:
    """Let dataset rows name a class of your own; usable as a decorator.

    Args:
        env_class: The environment.
        path: Its ``env_class_path``; by default module and name.

    Raises:
        ConfigError: It is no environment, or another class has that path.
    """
    if not (isinstance(env_class, type) and issubclass(env_class, MultistepEnv)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"register takes a subclass of MultistepEnv, got {env_class!r}")
    key = path or class_path(env_class)
    if _registered.get(key, env_class) is not env_class or key in _BUILT_IN:
        raise ConfigError(f"env_class_path {key!r} is taken by another class")
    _registered[key] = env_class
    return env_class


def find(path: str, *, allow_import: bool = False) -> type[MultistepEnv]:
    """The class that ``path`` names.

    Args:
        path: An ``env_class_path``.
        allow_import: Import a path that nobody registered. Only for datasets you trust as much as code.

    Raises:
        ConfigError: The path is unknown, or is no environment.
    """
    if path in _registered:
        return _registered[path]
    if path in _BUILT_IN or allow_import:
        return _imported(path)
    entry_points = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if path in entry_points:
        return _checked(path, entry_points[path].load())
    known = {*_BUILT_IN, *_registered, *entry_points}
    raise ConfigError(
        f"env_class_path {path!r} is not registered{did_you_mean(path, known)}"
        " (agentsgym.register adds a class of yours; allow_import=True imports one you trust)"
    )


def make(
    row: Mapping[str, Any] | str, tokenizer: PreTrainedTokenizerBase | None = None, *, allow_import: bool = False
) -> MultistepEnv:
    """Build the environment that a dataset row (or an ``env_class_path`` alone) names.

    Raises:
        ConfigError: The row has no ``env_class_path``, or the path or its ``env_config`` is not valid.
    """
    if isinstance(row, str):
        row = {"env_class_path": row}
    if not isinstance(row, Mapping) or not isinstance(row.get("env_class_path"), str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a row must be a dict with an 'env_class_path' (str), got {row!r}")
    env_class = find(row["env_class_path"], allow_import=allow_import)
    config = row.get("env_config")
    is_dict = isinstance(config, Mapping)
    return env_class(tokenizer, without_filling(cast("Row", config), env_class) if is_dict else config)


def without_filling(config: Row, env_class: type[MultistepEnv]) -> dict[str, Any]:
    """Leave out what the row of a table holds as None because another row has the key, and this game cannot take."""
    fields = {**COMMON_FIELDS, **env_class.config_fields}
    return {
        key: value for key, value in config.items() if value is not None or (key in fields and fields[key].valid(None))
    }


def _imported(path: str) -> type[MultistepEnv]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: no absolute module name
        raise ConfigError(f"env_class_path {path!r} cannot be imported: {error}") from error
    return _checked(path, found)


def _checked(path: str, found: object) -> type[MultistepEnv]:
    if isinstance(found, type) and issubclass(found, MultistepEnv):
        return found
    raise ConfigError(f"env_class_path {path!r} must name a subclass of MultistepEnv, got {found!r}")
