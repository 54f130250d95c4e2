"""Import names when they are first used, so that importing a package stays fast."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from agentsgym.removed import REMOVED


def lazy(package: str, otherwise: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Make a ``__getattr__`` for a package that imports each public name when it is first used.

    The module of each name is read from the imports in the package's ``if TYPE_CHECKING:`` block.

    Args:
        package: The package's ``__name__``.
        otherwise: Function that resolves any other name; by default, other names raise ``AttributeError``.
    """

    @functools.cache
    def modules_by_name() -> dict[str, str | None]:
        import ast  # noqa: PLC0415  # slow imports, not needed to import a package
        from pathlib import Path  # noqa: PLC0415

        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
        imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module for node in imports for alias in node.names}

    def find(name: str) -> Any:
        module = modules_by_name().get(name)
        if module is not None:
            value = getattr(importlib.import_module(module), name)
            setattr(sys.modules[package], name, value)
            return value
        if name in REMOVED:
            raise ImportError(f"{package} has no {name!r}: {REMOVED[name]}")
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def deferred(module: str, name: str) -> Callable[..., Any]:
    """Make a function that imports and calls another function when it is called.

    It lets low-level classes have methods that are implemented in high-level modules, such as the display in a
    notebook, without importing those modules. ``tests/test_layers.py`` lists the allowed uses.

    Args:
        module: The full name of the module.
        name: The name of the function in that module.

    >>> deferred("math", "sqrt")(4.0)
    2.0
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
