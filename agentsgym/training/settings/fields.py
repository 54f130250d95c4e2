"""Declare a setting of a training run: its default, its help, and what is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from agentsgym.fields import Check


class _Metadata(dict[str, Any]):
    """Metadata of a field, of which ``HfArgumentParser``, which copies it to argparse, gets the help alone."""

    def copy(self) -> dict[str, Any]:
        return {"help": self["help"]}

    def keys(self) -> Any:  # what ``dict(field.metadata)`` asks for
        return self.copy().keys()


def number(default: Any, help: str, *, expected: str, valid: Check) -> Any:  # argparse's word
    """A field whose value must be valid; ``expected`` ends the sentence "must be …"."""
    return field(default=default, metadata=_Metadata(help=help, env_expected=expected, env_valid=valid))


def choice(default: str | None, help: str, choices: Sequence[str | None]) -> Any:
    """A field whose value must be one of a few names."""
    return field(default=default, metadata=_Metadata(help=help, env_choices=tuple(choices)))
