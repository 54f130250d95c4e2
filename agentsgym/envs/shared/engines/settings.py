"""The process settings shared by environments that use engines."""

from __future__ import annotations

from agentsgym.fields import Field, is_int, is_positive_number

_SECONDS = "a positive number of seconds"


def process_fields(num_processes: int) -> dict[str, Field]:
    """Return the keys of ``env_config`` that configure processes, with the given default number."""
    return {
        "num_processes": Field(default=num_processes, expected="a positive int", valid=is_int(1)),
        "step_timeout_s": Field(default=60.0, expected=_SECONDS, valid=is_positive_number),
        "start_timeout_s": Field(default=180.0, expected=_SECONDS, valid=is_positive_number),
    }
