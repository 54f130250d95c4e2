"""Read a section of a configuration: a dataclass whose fields say what is valid, and errors that know their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.fields import Check
from agentsgym.texts import shown

Keys = tuple[str | int, ...]
SectionT = TypeVar("SectionT")


class PlacedError(ConfigError):
    """A value of a configuration is wrong.

    Attributes:
        keys: They lead to the value.
        problem: What is wrong, as the end of a sentence that begins with the place.
    """

    def __init__(self, keys: Keys, problem: str) -> None:
        self.keys, self.problem = keys, problem
        super().__init__(f"{place_of(keys)} {problem}")

    def below(self, *keys: str | int) -> PlacedError:
        """The same, seen from further up."""
        return PlacedError((*keys, *self.keys), self.problem)


def place_of(keys: Keys) -> str:
    """Write a place as a person would.

    >>> place_of(("environments", 0, "weight")), place_of(())
    ('environments[0].weight', 'the configuration')
    """
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".") or "the configuration"


def must_be(expected: str, valid: Check) -> dict[str, Any]:
    """The metadata of a field that says what is valid; ``expected`` ends the sentence "must be …"."""
    return {"expected": expected, "valid": valid}


def check_section(section: Any) -> None:
    """Check every field that says what is valid; for ``__post_init__``.

    Raises:
        PlacedError: A value is not valid.
    """
    for one in dataclasses.fields(section):
        value = getattr(section, one.name)
        if one.metadata and not one.metadata["valid"](value):
            raise PlacedError((_written(one),), f"must be {one.metadata['expected']}, got {shown(value)}")


def read_section(section: type[SectionT], values: Any) -> SectionT:
    """Make a section of plain values.

    Raises:
        PlacedError: They are no mapping, a key is unknown or missing, or a value is not valid.
    """
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
    """Give values as a dict.

    Raises:
        PlacedError: They are no mapping whose keys are texts.
    """
    if not isinstance(values, Mapping):
        raise PlacedError((), f"must have keys and their values, got {shown(values)}")
    given = cast("Mapping[Any, Any]", values)
    for one in given:
        if not isinstance(one, str):
            raise PlacedError((), f"has keys that must be texts, got {shown(one)}")
    return dict(given)


def is_mapping(value: Any) -> bool:
    """Accept mappings whose keys are texts."""
    return isinstance(value, Mapping) and all(isinstance(one, str) for one in cast("Mapping[Any, Any]", value))


def _written(one: dataclasses.Field[Any]) -> str:
    """A field's name as it is written in a file: a word that Python keeps for itself has an underscore in Python."""
    return one.name.removesuffix("_")
