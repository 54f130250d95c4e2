"""Describe one setting: its default, its valid values, and how error messages describe them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.texts import shown
from agentsgym.types import Trajectory

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of ``env_config``, or one field of ``GRPOEnvConfig``.

    Attributes:
        default: The value if none is given.
        valid: Whether a value is valid.
        expected: What a valid value is, as the end of "must be …".
    """

    default: Any
    valid: Check
    expected: str


def is_int(low: int = -(2**63)) -> Check:
    """Make a check that accepts 64-bit ints of at least ``low``, but not ``True`` or ``False``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63


def is_number(low: float = -math.inf) -> Check:
    """Make a check that accepts finite numbers of at least ``low``."""
    return lambda value: (is_int()(value) or isinstance(value, float)) and math.isfinite(value) and value >= low


def is_positive_number(value: Any) -> bool:
    """Accept finite numbers above 0."""
    return is_number(0)(value) and value > 0


def is_seconds(value: Any) -> bool:
    """Accept positive durations that a lock can wait for: up to 292 years."""
    return is_positive_number(value) and value <= threading.TIMEOUT_MAX


def is_fraction(value: Any) -> bool:
    """Accept numbers in [0, 1]."""
    return is_number(0)(value) and value <= 1


def is_bool(value: Any) -> bool:
    """Accept only True and False."""
    return isinstance(value, bool)


def is_str(value: Any) -> bool:
    """Accept strings."""
    return isinstance(value, str)


def is_text(value: Any) -> bool:
    """Accept strings that are not only whitespace."""
    return is_str(value) and bool(value.strip())


def is_strings(value: Any) -> bool:
    """Accept lists of strings."""
    return isinstance(value, list | tuple) and all(map(is_str, cast("list[Any]", value)))


def is_list(value: Any) -> bool:
    """Accept lists, tuples, arrays and other sequences, but not strings."""
    if isinstance(value, list | tuple | str | bytes | Mapping):
        return isinstance(value, list | tuple)
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()


def are_numbers(value: Any) -> bool:
    """Accept lists of numbers."""
    return is_list(value) and all(issubclass(kind, Real) for kind in set[Any](map(type, value)))


def is_dict(value: Any) -> bool:
    """Accept mappings."""
    return isinstance(value, Mapping)


def is_hashable(value: Any) -> bool:
    """Accept values that can be the keys of a dict."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def has_str_keys(value: Any) -> bool:
    """Accept mappings whose keys are strings."""
    return isinstance(value, Mapping) and all(map(is_str, cast("Mapping[Any, Any]", value)))


def one_of(*choices: str) -> Check:
    """Make a check that accepts only the given strings."""
    return lambda value: isinstance(value, str) and value in choices


def or_none(check: Check) -> Check:
    """Make a check that accepts None and every value that ``check`` accepts."""
    return lambda value: value is None or check(value)


def choice_field(*choices: str) -> Field:
    """Make a field whose valid values are ``choices``; the first is the default."""
    return Field(default=choices[0], expected="one of " + ", ".join(map(repr, choices)), valid=one_of(*choices))


def require(name: str, value: Any, valid: Check, expected: str, error: type[Exception] = ConfigError) -> None:
    """Check one setting.

    Args:
        name: The setting's name.
        value: Its value.
        valid: Whether a value is valid.
        expected: What a valid value is, as the end of "must be …".
        error: The class of the error that is raised for another value.

    >>> require("num_workers", 0, is_int(1), "a positive int")
    Traceback (most recent call last):
    agentsgym.errors.ConfigError: num_workers must be a positive int, got 0
    """
    if not valid(value):
        raise error(f"{name} must be {expected}, got {shown(value)}")


def check_rollout(name: str, value: Any) -> None:
    """Reject anything but a trajectory."""
    is_one: Check = lambda value: isinstance(value, Trajectory)  # noqa: E731
    require(name, value, is_one, "a rollout, such as store[0] or evaluation.trajectories[0]")


def check_rollouts(name: str, value: Any) -> None:
    """Reject a single trajectory, and what only contains trajectories."""
    is_some: Check = lambda value: isinstance(value, Iterable)  # noqa: E731
    require(name, value, is_some, "a list of rollouts, such as [rollout], evaluation.trajectories or a store")


def check_choice(option: str, given: Any, known: Iterable[str]) -> None:
    """Reject a value that is not one of the known names."""
    names = tuple(known)
    if not isinstance(given, str) or given not in names:
        hint = did_you_mean(given if isinstance(given, str) else shown(given), names, kind=option)
        raise ConfigError(f"{option} cannot be {shown(given)}{hint}")


def check_number(option: str, given: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Reject anything but a finite number in [low, high]."""
    if is_number(low)(given) and given <= high:
        return
    above = f"a finite number >= {low:g}" if math.isinf(high) else f"a number in [{low:g}, {high:g}]"
    expected = "a finite number" if math.isinf(low) else above
    raise ConfigError(f"{option} must be {expected}, got {shown(given)}")
