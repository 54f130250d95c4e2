"""Read YAML, and refuse a key that stands twice: one of the two would be dropped without a word."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping whose keys stand there once each; what is merged into it (``<<``) may be replaced."""
        lines: dict[tuple[str, Any], int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                known = (key.tag, key.value)
                if known in lines:
                    raise yaml.YAMLError(
                        f"line {key.start_mark.line + 1} says {key.value!r} again, as line {lines[known]} does"
                    )
                lines[known] = key.start_mark.line + 1
        untyped: Any = super()
        return untyped.construct_mapping(node, deep=deep)


def values_of_yaml(text: str) -> Any:
    r"""Read YAML, of which JSON is a part.

    Raises:
        YAMLError: The text is none, or a key stands twice in one mapping.

    >>> values_of_yaml("max_steps: 1\nlayout: turn\nmax_steps: 2")
    Traceback (most recent call last):
    yaml.error.YAMLError: line 3 says 'max_steps' again, as line 1 does
    """
    untyped: Any = yaml
    return untyped.load(text, Loader=_Loader)  # it is a SafeLoader
