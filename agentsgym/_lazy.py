"""Import names when they are first used, so that importing a package stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentsgym.removed import REMOVED


def lazy(
    package: str, names_by_module: Mapping[str, Sequence[str]], otherwise: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], list[str]]:
    """Make the ``__getattr__`` of a package, which imports each public name when it is first used, and its ``__all__``.

    Type checkers read the same names from the imports in the package's ``if TYPE_CHECKING:`` block.

    Args:
        package: The package's ``__name__``.
        names_by_module: The public names of each module; a module of this package begins with a dot.
        otherwise: Function that resolves any other name; by default, other names raise ``AttributeError``.
    """
    modules = {name: module for module, names in names_by_module.items() for name in names}

    def find(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(modules[name], package), name)
            setattr(sys.modules[package], name, value)
            return value
        if name in REMOVED:
            raise ImportError(f"{package} has no {name!r}: {REMOVED[name]}")
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, sorted(modules)


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
