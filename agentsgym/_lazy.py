"""Import names when they are first used, so that importing a package stays light."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy(package: str, otherwise: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` that imports a public name at its first use.

    Where a name comes from is written once, for type checkers: in the package's ``if TYPE_CHECKING:``.

    Args:
        package: The package's ``__name__``.
        otherwise: Function that resolves any other name; by default none resolves.
    """

    @functools.cache
    def homes() -> dict[str, str | None]:
        import ast  # noqa: PLC0415  # these two are slow, and importing a package needs neither
        from pathlib import Path  # noqa: PLC0415

        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
        imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module for node in imports for alias in node.names}

    def find(name: str) -> Any:
        home = homes().get(name)
        if home is not None:
            value = getattr(importlib.import_module(home), name)
            setattr(sys.modules[package], name, value)
            return value
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def deferred(module: str, name: str) -> Callable[..., Any]:
    """Make a function that imports its target when it is called.

    For values at the base of the library that notebooks display or that are made from foreign records: loading them
    must not load the modules far above them that do so. ``tests/test_layers.py`` lists the allowed uses.

    Args:
        module: The module, written out.
        name: Name of the function in it.

    >>> deferred("math", "sqrt")(4.0)
    2.0
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
