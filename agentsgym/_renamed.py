"""Keep an old public name working for one version after it was renamed or moved."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's ``__getattr__`` that finds what used to have another name there, with a ``DeprecationWarning``.

    Args:
        module: The module's ``__name__``.
        names: Each old name with the full path of what it is now, as in ``"agentsgym.errors.AgentError"``.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new_name = names[name].rpartition(".")
        warnings.warn(f"{module}.{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), new_name)

    return find
