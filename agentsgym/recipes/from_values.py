"""Make the settings of a run from plain values, as a file of YAML holds them."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from trl import ModelConfig, SFTConfig

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field
from agentsgym.recipes.command_line import check_model_config, common_defaults
from agentsgym.texts import sentence_of, shown
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.settings import MOVED, EnvSettings, number_in

SettingsT = TypeVar("SettingsT")

# Wider than their hints: a command line has one type a setting, and TRL and transformers say less than they take.
_WIDER: dict[str, Any] = dict.fromkeys(("resume_from_checkpoint", "fsdp"), bool | str | None)
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class FieldError(ConfigError):
    """A field of settings is unknown or of the wrong type.

    Attributes:
        name: The field.
        problem: What is wrong, as the end of a sentence that begins with the field.
    """

    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"{name} {problem}")


def training_settings(values: Mapping[str, Any], *, output_dir: str) -> GRPOEnvConfig:
    """Make the settings of the trainer; what is not given is as in a training script.

    Args:
        values: Fields of ``GRPOEnvConfig``.
        output_dir: That field where it is not given.

    Raises:
        ConfigError: A field is unknown, of the wrong type, or not valid.
    """
    checked = checked_values(GRPOEnvConfig, values)
    return _made(GRPOEnvConfig, {"output_dir": output_dir, **common_defaults(), **checked})


def model_settings(values: Mapping[str, Any]) -> ModelConfig:
    """Make TRL's settings of the model: adapters, dtype, attention, revision.

    Raises:
        ConfigError: A field is unknown, of the wrong type, or not supported.
    """
    settings = _made(ModelConfig, checked_values(ModelConfig, values))
    check_model_config(settings)
    if settings.model_name_or_path:
        raise ConfigError("model_name_or_path is not for here: the key 'model' names the model")
    return settings


def imitation_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check fields of TRL's ``SFTConfig``.

    Raises:
        ConfigError: A field is unknown or of the wrong type.
    """
    return checked_values(SFTConfig, values)


def checked_values(settings: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types; a number that YAML takes for a text, as it does 1e-3, becomes one.

    Raises:
        FieldError: A field is unknown or of the wrong type.
    """
    known = {one.name: one for one in dataclasses.fields(settings) if one.init}
    hints = _hints(settings)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            moved = MOVED.get(name) if issubclass(settings, EnvSettings) else None
            raise FieldError(name, moved or f"is unknown{did_you_mean(name, known)}")
        check = known[name].metadata.get("check")  # of a setting of our own, which may take more than its type says
        checked[name] = _as(hints[name], value, name) if check is None else _checked(check, value, name)
    return checked


def _checked(check: Field, value: Any, name: str) -> Any:
    for one in (value, number_in(value)):
        if check.valid(one):
            return one
    raise FieldError(name, f"must be {check.expected}, got {shown(value)}")


@functools.cache
def _hints(settings: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(settings)
    return hints | {name: hint for name, hint in _WIDER.items() if name in hints}


def _as(hint: Any, value: Any, name: str) -> Any:
    """Check a value against a type of bools, numbers and texts; what else a type says is left to the settings."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if is_union else (hint,)
    if isinstance(value, str) and float in kinds and str not in kinds:
        try:
            return float(value)
        except ValueError:
            pass  # the error below says it better
    wanted = {*kinds} - {type(None)}
    if not wanted <= _WORDS.keys() or (value is None and type(None) in kinds):
        return value
    if type(value) in wanted or (type(value) is int and float in wanted):
        return value
    if wanted == {str} and callable(value):
        return value  # an estimator of one's own
    expected = [words for kind, words in _WORDS.items() if kind in wanted]
    expected += ["null"] if type(None) in kinds else []
    raise FieldError(name, f"must be {' or '.join(expected)}, got {shown(value)}")


def _made(settings: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
    try:
        return settings(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:  # TRL's and transformers' own checks
        raise ConfigError(sentence_of(error)) from error
