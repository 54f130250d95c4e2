"""Read a section of a configuration: a dataclass whose fields are checked, and errors that name the key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check, has_str_keys
from agentsgym.texts import shown

Keys = tuple[str | int, ...]
SectionT = TypeVar("SectionT")


class PlacedError(ConfigError):
    """A value of a configuration is invalid.

    Attributes:
        keys: Keys and indices of the value.
        problem: The problem, as the end of a sentence that begins with the key.
    """

    def __init__(self, keys: Keys, problem: str) -> None:
        self.keys, self.problem = keys, problem
        super().__init__(f"{place_of(keys)} {problem}")

    def below(self, *keys: str | int) -> PlacedError:
        """Return the error with the keys of the enclosing section."""
        return PlacedError((*keys, *self.keys), self.problem)


def place_of(keys: Keys) -> str:
    """Format keys as a dotted path.

    >>> place_of(("environments", 0, "weight")), place_of(())
    ('environments[0].weight', 'the configuration')
    """
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "the configuration"


def must_be(expected: str, valid: Check) -> dict[str, Any]:
    """Return the metadata of a checked field; ``expected`` ends the sentence "must be …"."""
    return {"expected": expected, "valid": valid}


def mapping_of(what: str) -> dict[str, Any]:
    """Return the metadata of a field that is a mapping with strings as keys."""
    return must_be(f"a mapping of {what}", has_str_keys)


def check_section(section: Any) -> None:
    """Check every field; for ``__post_init__``."""
    for one in dataclasses.fields(section):
        value = getattr(section, one.name)
        if one.metadata and not one.metadata["valid"](value):
            raise PlacedError((_written(one),), f"must be {one.metadata['expected']}, got {shown(value)}")


def read_section(section: type[SectionT], values: Any) -> SectionT:
    """Build a section from plain values."""
    given = as_mapping(values)
    fields = {_written(one): one for one in dataclasses.fields(cast("Any", section))}
    for name in given:
        if name not in fields:
            raise PlacedError((name,), f"is unknown{did_you_mean(name, fields)}")
    for name, one in fields.items():
        if one.default is one.default_factory and name not in given:  # both are MISSING
            raise PlacedError((), f"has no {name!r}, which must be {one.metadata['expected']}")
    return section(**{fields[name].name: value for name, value in given.items()})


def as_mapping(values: Any) -> dict[str, Any]:
    """Convert a mapping to a dict."""
    if not isinstance(values, Mapping):
        raise PlacedError((), f"must be a mapping, got {shown(values)}")
    given = cast("Mapping[Any, Any]", values)
    for one in given:
        if not isinstance(one, str):
            raise PlacedError((), f"must have strings as keys, got {shown(one)}")
    return dict(given)


def _written(one: dataclasses.Field[Any]) -> str:
    """Return a field's name in a file, without the underscore after a Python keyword."""
    return one.name.removesuffix("_")
