"""Import names when they are first used, so that importing a package stays light."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` that imports a public name from its module at its first use.

    Args:
        package: The package's ``__name__``.
        homes: The public names by module, the module written without the package.
    """
    home_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def called_later(module: str, name: str) -> Callable[..., Any]:
    """Make a function that imports the function it stands for when it is called.

    For the values at the base of the library, which a notebook asks to draw themselves, and which are made of what was
    recorded elsewhere: what does that stands far above them, and loading them must not load it.
    ``tests/test_layers.py`` names the files that may use it, and for what.

    Args:
        module: The module, written out.
        name: Of the function in it.

    >>> called_later("math", "sqrt")(4.0)
    2.0
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call
