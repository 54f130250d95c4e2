"""``env_config``: what each key means, its default, and errors that name the key and what would be right."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentsgym.credit.rewards import TOKEN_CREDITS, TURN_CREDITS
from agentsgym.errors import ConfigError, did_you_mean

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of ``env_config``.

    Attributes:
        default: Its value when it is not given.
        wanted: What a valid value is, as the end of "must be …".
        valid: Whether a value is one.
    """

    default: Any
    wanted: str
    valid: Check


def is_int(low: int) -> Check:
    """Accept ints from ``low`` on; ``True`` is no int here."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_number(low: float = -math.inf) -> Check:
    """Accept finite numbers from ``low`` on."""
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= low
    )


def is_bool(value: Any) -> bool:
    """Accept True and False alone."""
    return isinstance(value, bool)


def is_str(value: Any) -> bool:
    """Accept strings."""
    return isinstance(value, str)


def one_of(*choices: str) -> Check:
    """Accept the given strings."""
    return lambda value: isinstance(value, str) and value in choices


def or_none(check: Check) -> Check:
    """Accept None and what ``check`` accepts."""
    return lambda value: value is None or check(value)


def choice_field(*choices: str) -> Field:
    """A key that takes one of ``choices``, the first by default."""
    return Field(default=choices[0], wanted="one of " + ", ".join(map(repr, choices)), valid=one_of(*choices))


COMMON_FIELDS: dict[str, Field] = {
    "max_steps_per_episode": Field(default=20, wanted="a positive int", valid=is_int(1)),
    "episodes_per_trial": Field(default=1, wanted="a positive int", valid=is_int(1)),
    "free_shots": Field(default=0, wanted="a non-negative int", valid=is_int(0)),
    "error_allowance": Field(default=1, wanted="a non-negative int", valid=is_int(0)),
    "system_prompt": Field(default=None, wanted="a str ('' for none) or None", valid=or_none(is_str)),
    "max_trajectory_tokens": Field(default=None, wanted="a positive int or None", valid=or_none(is_int(1))),
    "turn_credit": choice_field(*TURN_CREDITS),
    "token_credit": choice_field(*TOKEN_CREDITS),
    "keep_history": Field(default=False, wanted="True or False", valid=is_bool),
    "history": Field(
        default="append",
        wanted="'append', 'rerender' or a function from messages to messages",
        valid=lambda value: callable(value) or one_of("append", "rerender")(value),
    ),
}


def validated_config(
    given: Mapping[str, Any] | None, fields: Mapping[str, Field], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the given keys and fill in the rest.

    Args:
        given: What the user wrote; None for nothing.
        fields: Every known key.
        defaults: Values that replace the fields' own defaults.

    Raises:
        ConfigError: ``given`` is no mapping, or a key is unknown, or a value is not valid.
    """
    if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"env_config must be a dict or None, got {given!r}")
    config = {key: field.default for key, field in fields.items()}
    for name, values in (("default_config", defaults), ("env_config", given or {})):
        for key, value in values.items():
            if key not in fields:
                raise ConfigError(f"{name}[{key!r}] is unknown{did_you_mean(str(key), fields)}")
            if not fields[key].valid(value):
                raise ConfigError(f"{name}[{key!r}] must be {fields[key].wanted}, got {value!r}")
            config[key] = value
    # A callable may hold a client or a lock: it is shared, plain values are the env's own.
    return {key: value if callable(value) else copy.deepcopy(value) for key, value in config.items()}


def check_trials(config: Mapping[str, Any]) -> None:
    """Refuse a trial that is all practice.

    Raises:
        ConfigError: ``free_shots >= episodes_per_trial``.
    """
    if config["free_shots"] >= config["episodes_per_trial"]:
        raise ConfigError(
            "env_config['free_shots'] must be smaller than env_config['episodes_per_trial'], "
            f"got {config['free_shots']} of {config['episodes_per_trial']}"
        )
