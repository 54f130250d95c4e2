"""Read YAML, and reject duplicate keys, which YAML loaders otherwise drop silently."""

from __future__ import annotations

from typing import Any

import yaml

from agentsgym.texts import shown


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
