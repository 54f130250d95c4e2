"""What environments over engines share: the settings of their processes, and the check that a package is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from agentsgym.errors import MissingDependencyError
from agentsgym.fields import Field, is_int, is_positive_number

_SECONDS = "a positive number of seconds"


def process_fields(num_processes: int) -> dict[str, Field]:
    """Give the keys of ``env_config`` that set up processes, with how many there are by default."""
    return {
        "num_processes": Field(default=num_processes, expected="a positive int", valid=is_int(1)),
        "step_timeout_s": Field(default=60.0, expected=_SECONDS, valid=is_positive_number),
        "start_timeout_s": Field(default=180.0, expected=_SECONDS, valid=is_positive_number),
    }


def check_installed(packages: Iterable[str], extra: str) -> None:
    """Look for packages, without importing them.

    Raises:
        MissingDependencyError: One is not there; ``extra`` installs it.
    """
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ValueError:  # sys.modules has None for it
            found = None
        if found is None:
            raise MissingDependencyError(package, extra)
