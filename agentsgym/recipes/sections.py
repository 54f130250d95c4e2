"""Read YAML, and a section of it: a dataclass whose fields are checked, and errors that name the key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import yaml

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


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping without duplicate keys; keys merged into it (``<<``) may be replaced."""
        lines: dict[tuple[str, Any], int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                known = (key.tag, key.value)
                if known in lines:
                    raise yaml.YAMLError(
                        f"line {key.start_mark.line + 1} repeats the key {key.value!r} of line {lines[known]}"
                    )
                lines[known] = key.start_mark.line + 1
        untyped: Any = super()
        return untyped.construct_mapping(node, deep=deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Build a value; PyYAML itself raises any kind of error for a value such as ``!!int x`` or ``2020-13-45``."""
        untyped: Any = super()
        try:
            return untyped.construct_object(node, deep=deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            name = node.tag.rpartition(":")[2]
            raise yaml.YAMLError(
                f"line {node.start_mark.line + 1} has a value that is not a valid {name}: {shown(node.value)}"
            ) from error


def values_of_yaml(text: str) -> Any:
    r"""Parse YAML or JSON.

    >>> values_of_yaml("max_steps: 1\nlayout: turn\nmax_steps: 2")
    Traceback (most recent call last):
    yaml.error.YAMLError: line 3 repeats the key 'max_steps' of line 1
    """
    untyped: Any = yaml
    try:
        return untyped.load(text, Loader=_Loader)  # it is a SafeLoader
    except RecursionError as error:
        raise yaml.YAMLError("its values are nested too deeply") from error
