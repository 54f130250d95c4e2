"""Check the places that a run reads and writes at its end, before anything is played."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentsgym.errors import ConfigError
from agentsgym.recipes.sections import PlacedError
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from agentsgym.training.config import GRPOEnvConfig


def check_places(args: GRPOEnvConfig) -> None:
    """Check that the folder of a run can be made, and that there is what it resumes from; nothing is made yet.

    Raises:
        PlacedError: It cannot, or there is no such checkpoint.
    """
    output = Path(args.output_dir or "outputs")
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise PlacedError(("training", "output_dir"), f"must be a folder, and {there} is a file")
    if not os.access(there, os.W_OK):
        raise PlacedError(("training", "output_dir"), f"cannot be written: {there} does not let you")
    requested: Any = args.resume_from_checkpoint  # what a file says may be true too
    if not requested or requested == "auto":
        return
    if requested is True and not any(output.glob("checkpoint-*")):
        raise PlacedError(
            ("training", "resume_from_checkpoint"), f"is true, and {output} has no checkpoint; auto begins a run then"
        )
    if requested is not True and not Path(requested).is_dir():
        raise PlacedError(
            ("training", "resume_from_checkpoint"), f"must be a folder, auto or true, got {shown(requested)}"
        )


def make_folder(path: Path) -> None:
    """Make the folder of a run.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"training.output_dir cannot be made: {sentence_of(error)}") from error
