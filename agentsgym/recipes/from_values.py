"""Build the settings of a run from plain values, such as those of a YAML file or a command line."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from trl import ModelConfig, SFTConfig, TrlParser

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.recipes.sections import PlacedError
from agentsgym.removed import REMOVED
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.settings import foreign_checks, number_in, problem_of, types_of

logger = logging.getLogger(__name__)


@dataclass
class PolicyOptions:
    """The policy to train, and what happens to an earlier run; base class of a script's options."""

    model: str | None = field(
        default=None, metadata={"help": "Model name or path; the built-in tiny policy by default."}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Move an earlier run in output_dir to NAME.1; nothing is deleted."}
    )


OptionsT = TypeVar("OptionsT", bound=PolicyOptions)


def parse_options(
    options_type: type[OptionsT],
    *,
    output_dir: str,
    tiny_defaults: Mapping[str, Any] | Callable[[OptionsT], Mapping[str, Any]],
    defaults: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> tuple[OptionsT, GRPOEnvConfig, ModelConfig]:
    """Parse the options of a training script from the command line and from the YAML file of ``--config``.

    The command line takes precedence, then the file, then ``tiny_defaults`` (without a model), then ``defaults``, then
    :func:`common_defaults`. With the tiny policy, torch uses one thread, since more do not help a model this small.

    Args:
        options_type: Dataclass of the script's options.
        output_dir: Default value of the trainer's ``output_dir``.
        tiny_defaults: Default values of any fields for the tiny policy, or a function of the script's options that
            returns them.
        defaults: Default values of any fields for every policy.
        argv: The arguments; None for the arguments of the process.

    Returns:
        The script's options (whose ``model`` is also set by ``--model_name_or_path``), the trainer's settings, and
        TRL's model settings.
    """
    dataclasses: Any = (options_type, GRPOEnvConfig, ModelConfig)
    parser: Any = TrlParser(dataclasses)
    parser.set_defaults(**{"output_dir": output_dir, **common_defaults(), **(defaults or {})})
    options, args, model_config = _parsed(parser, argv)
    if options.model is None and model_config.model_name_or_path is None:
        torch.set_num_threads(1)
        parser.set_defaults(**(tiny_defaults(options) if callable(tiny_defaults) else tiny_defaults))
        options, args, model_config = _parsed(parser, argv)
    check_model_config(model_config, prefix="--")
    if options.model and model_config.model_name_or_path:
        raise ConfigError("--model and --model_name_or_path are the same option: use only one")
    options.model = options.model or model_config.model_name_or_path
    return options, args, model_config


def _parsed(parser: Any, argv: Sequence[str] | None) -> Any:
    *parsed, unknown = parser.parse_args_and_config(argv, return_remaining_strings=True)
    if unknown:
        names = (one.removeprefix("--").partition("=")[0] for one in unknown)
        hint = next((f": {REMOVED[name]}" for name in names if name in REMOVED), "")
        raise ConfigError(f"unknown arguments: {' '.join(unknown)}{hint}")
    return parsed


def common_defaults() -> dict[str, Any]:
    """Return the default values that training scripts and configurations share on this machine.

    Without an accelerator, ``use_cpu`` is True: otherwise multiple ranks on a CPU would not form a process group, and
    each would train alone and overwrite the others' files.
    """
    has_accelerator = torch.accelerator.is_available()
    return {
        "logging_steps": 20,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": False,  # otherwise it depends on the log level of transformers
        "dataloader_pin_memory": has_accelerator,
        "use_cpu": not has_accelerator,
    }


def check_model_config(model_config: ModelConfig, *, prefix: str = "") -> None:
    """Check that the trainer supports TRL's model settings."""
    if model_config.load_in_8bit:
        raise ConfigError(f"{prefix}load_in_8bit is not supported: use {prefix}load_in_4bit with adapters")
    if model_config.load_in_4bit and not model_config.use_peft:
        raise ConfigError(
            f"{prefix}load_in_4bit requires {prefix}use_peft: 4-bit weights cannot be trained, only adapters on them"
        )
    unused = () if model_config.use_peft else dataclasses.fields(model_config)
    for one in unused:
        if one.name.startswith("lora_") and getattr(model_config, one.name) != one.default:
            raise ConfigError(f"{prefix}{one.name} has no effect without {prefix}use_peft: set it to true")


def training_settings(values: Mapping[str, Any], *, output_dir: str) -> GRPOEnvConfig:
    """Build the trainer's settings, with the defaults of a training script.

    Raises:
        ConfigError: A field is unknown, of the wrong type, or not valid.
    """
    settings: dict[str, Any] = {"output_dir": output_dir, **common_defaults(), **checked_values(GRPOEnvConfig, values)}
    if settings["save_strategy"] == "no" and settings.get("resume_from_checkpoint") == "auto":
        logger.warning("resume_from_checkpoint=auto has no effect on runs without checkpoints: set save_strategy=steps")
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


def checked_values(settings: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types; a number that YAML parses as text, such as 1e-3, is converted."""
    known = {one.name: one for one in dataclasses.fields(settings) if one.init}
    types = types_of(settings)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise PlacedError((name,), f"is unknown{did_you_mean(name, known)}")
        if isinstance(value, bool) and name.endswith("_strategy"):
            raise PlacedError((name,), f"must be a name, but YAML reads no and off as {value}: write it in quotes")
        problem = problem_of(value, known[name], types[name])
        checked[name] = number_in(value) if problem else value
        if problem and problem_of(checked[name], known[name], types[name]):
            raise PlacedError((name,), problem)
    return checked


imitation_values = partial(checked_values, SFTConfig)
