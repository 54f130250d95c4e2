"""Describe one setting: its default, its valid values, and the words that errors use for them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import shown

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of ``env_config``, or one field of ``GRPOEnvConfig``.

    Attributes:
        default: Its value when it is not given.
        valid: Whether a value is valid.
        expected: What a valid value is, as the end of "must be …".
    """

    default: Any
    valid: Check
    expected: str


def is_int(low: int) -> Check:
    """Accept ints from ``low`` on; ``True`` is not an int here."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_number(low: float = -math.inf) -> Check:
    """Accept finite numbers from ``low`` on."""
    return lambda value: (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # of an int beyond it, isfinite raises
        and value >= low
    )


def is_positive_number(value: Any) -> bool:
    """Accept finite numbers above 0."""
    return is_number(0)(value) and value > 0


def is_fraction(value: Any) -> bool:
    """Accept numbers in [0, 1]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def is_bool(value: Any) -> bool:
    """Accept True and False alone."""
    return isinstance(value, bool)


def is_str(value: Any) -> bool:
    """Accept strings."""
    return isinstance(value, str)


def is_strings(value: Any) -> bool:
    """Accept lists of strings."""
    return isinstance(value, list | tuple) and all(map(is_str, cast("list[Any]", value)))


def has_str_keys(value: Any) -> bool:
    """Accept mappings whose keys are strings."""
    return isinstance(value, Mapping) and all(map(is_str, cast("Mapping[Any, Any]", value)))


def one_of(*choices: str) -> Check:
    """Accept the given strings."""
    return lambda value: isinstance(value, str) and value in choices


def or_none(check: Check) -> Check:
    """Accept None and what ``check`` accepts."""
    return lambda value: value is None or check(value)


def choice_field(*choices: str) -> Field:
    """Make a field with the valid values ``choices``, the first by default."""
    return Field(default=choices[0], expected="one of " + ", ".join(map(repr, choices)), valid=one_of(*choices))


def require(name: str, value: Any, valid: Check, expected: str) -> None:
    """Check one setting.

    Args:
        name: The setting's name.
        value: Its value.
        valid: Whether a value is valid.
        expected: What a valid value is, as the end of "must be …".

    Raises:
        ConfigError: The value is not valid.

    >>> require("num_workers", 0, is_int(1), "a positive int")
    Traceback (most recent call last):
    agentsgym.errors.ConfigError: num_workers must be a positive int, got 0
    """
    if not valid(value):
        raise ConfigError(f"{name} must be {expected}, got {shown(value)}")


def check_choice(option: str, given: Any, known: Iterable[str]) -> None:
    """Refuse an unknown name.

    Raises:
        ConfigError: It is unknown.
    """
    names = tuple(known)
    if given not in names:
        raise ConfigError(f"{option} is unknown: {given!r}{did_you_mean(str(given), names)}")


def check_number(option: str, given: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse anything but a finite number in [low, high].

    Raises:
        ConfigError: It is something else.
    """
    if is_number(low)(given) and given <= high:
        return
    above = f"a finite number >= {low:g}" if math.isinf(high) else f"a number in [{low:g}, {high:g}]"
    expected = "a finite number" if math.isinf(low) else above
    raise ConfigError(f"{option} must be {expected}, got {given!r}")
