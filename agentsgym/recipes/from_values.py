"""Build the settings of a run from plain values, such as those of a YAML file."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from trl import ModelConfig, SFTConfig

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Field
from agentsgym.recipes.command_line import check_model_config, common_defaults
from agentsgym.recipes.sections import PlacedError
from agentsgym.texts import shown
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.settings import foreign_checks, number_in

# Types wider than the hints, which allow one type per setting for the command line.
_WIDER: dict[str, Any] = dict.fromkeys(("resume_from_checkpoint", "fsdp"), bool | str | None)
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def training_settings(values: Mapping[str, Any], *, output_dir: str) -> GRPOEnvConfig:
    """Build the trainer's settings, with the defaults of a training script.

    Raises:
        ConfigError: A field is unknown, of the wrong type, or not valid.
    """
    settings: dict[str, Any] = {"output_dir": output_dir, **common_defaults(), **checked_values(GRPOEnvConfig, values)}
    with foreign_checks("GRPOEnvConfig"):
        return GRPOEnvConfig(**settings)


def model_settings(values: Mapping[str, Any]) -> ModelConfig:
    """Build TRL's settings of the model: adapters, dtype, attention, revision.

    Raises:
        ConfigError: A field is unknown, of the wrong type, or not supported.
    """
    checked = checked_values(ModelConfig, values)
    with foreign_checks("ModelConfig"):
        settings = ModelConfig(**checked)
    check_model_config(settings)
    if settings.model_name_or_path:
        raise ConfigError("model_name_or_path cannot be set here: use the key 'model'")
    return settings


def imitation_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check fields of TRL's ``SFTConfig``.

    Raises:
        ConfigError: A field is unknown or of the wrong type.
    """
    return checked_values(SFTConfig, values)


def checked_values(settings: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types; a number that YAML parses as text, such as 1e-3, is converted."""
    known = {one.name: one for one in dataclasses.fields(settings) if one.init}
    hints = typing.get_type_hints(settings) | _WIDER
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise PlacedError((name,), f"is unknown{did_you_mean(name, known)}")
        check: Field | None = known[name].metadata.get("check")  # in our settings, which may accept more than the type
        if check is None:
            checked[name] = _converted(value, hints[name], name)
            continue
        valid = [one for one in (value, number_in(value)) if check.valid(one)]
        if not valid:
            raise PlacedError((name,), f"must be {check.expected}, got {shown(value)}")
        checked[name] = valid[0]
    return checked


def _converted(value: Any, hint: Any, name: str) -> Any:
    """Check a value against a type hint of bools, numbers and strings; the settings check other types themselves."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if is_union else (hint,)
    if isinstance(value, str) and float in kinds and str not in kinds:
        try:
            return float(value)
        except ValueError:
            pass  # the error below is clearer
    wanted = {*kinds} - {type(None)}
    if not wanted <= _WORDS.keys() or (value is None and type(None) in kinds):
        return value
    if type(value) in wanted or (type(value) is int and float in wanted):
        return value
    if wanted == {str} and callable(value):
        return value  # a user's estimator
    expected = [words for kind, words in _WORDS.items() if kind in wanted]
    expected += ["null"] if type(None) in kinds else []
    raise PlacedError((name,), f"must be {' or '.join(expected)}, got {shown(value)}")
