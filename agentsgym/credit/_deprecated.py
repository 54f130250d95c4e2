"""Keep a keyword of a function working for one version after it was renamed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from agentsgym.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def renamed_keywords(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Take keywords by their old names as well, with a ``DeprecationWarning``.

    Args:
        **new_names: Each old keyword with what it is called now.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain: Any = function

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            return plain(*args, **current_keywords(new_names, keywords))

        cast("Any", call).renamed_keywords = new_names
        return call

    return decorate


def current_keywords(new_names: Mapping[str, str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Give keywords that go by an old name the name that they have now.

    Raises:
        ConfigError: The old name and the new one are both there.
    """
    current: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = new_names.get(keyword, keyword)
        if name != keyword:
            if name in keywords:
                raise ConfigError(f"{keyword!r} is the old name of {name!r}: give one of them, got both")
            warnings.warn(f"the option {keyword!r} is now {name!r}", DeprecationWarning, stacklevel=3)
        current[name] = value
    return current
