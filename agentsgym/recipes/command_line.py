"""Parse the command line of a training script: its options, every ``GRPOEnvConfig`` field, TRL's ``ModelConfig``.

A script's options are a dataclass derived from :class:`PolicyOptions`::

    @dataclass
    class Options(PolicyOptions):
        num_episodes: int = field(default=400, metadata={"help": "Episodes per evaluation."})

    options, args, model_config = parse_options(Options, output_dir="outputs/mine", tiny_defaults={"max_steps": 300})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from trl import ModelConfig, TrlParser

from agentsgym.errors import ConfigError
from agentsgym.removed import REMOVED
from agentsgym.training.config import GRPOEnvConfig


@dataclass
class PolicyOptions:
    """The policy to train; base class of a script's options."""

    model: str | None = field(
        default=None, metadata={"help": "Model name or path; the built-in tiny policy by default."}
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
