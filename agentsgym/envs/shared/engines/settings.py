"""The settings that environments over engines share: those of their processes."""

from __future__ import annotations

from agentsgym.fields import Field, is_int, is_positive_number

_SECONDS = "a positive number of seconds"


def process_fields(num_processes: int) -> dict[str, Field]:
    """Give the keys of ``env_config`` that set up processes, with how many there are by default."""
    return {
        "num_processes": Field(default=num_processes, expected="a positive int", valid=is_int(1)),
        "step_timeout_s": Field(default=60.0, expected=_SECONDS, valid=is_positive_number),
        "start_timeout_s": Field(default=180.0, expected=_SECONDS, valid=is_positive_number),
    }
