"""Check the folders that a run reads and writes before anything is played."""

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
    """Check that the output folder can be created and that the checkpoint to resume from exists.

    Raises:
        PlacedError: The folder cannot be created, or the checkpoint does not exist.
    """
    output = Path(args.output_dir or "outputs")
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise PlacedError(("training", "output_dir"), f"must be a folder, but {there} is a file")
    if not os.access(there, os.W_OK):
        raise PlacedError(("training", "output_dir"), f"cannot be created: no permission to write to {there}")
    requested: Any = args.resume_from_checkpoint  # a YAML file may also set true
    if not requested or requested == "auto":
        return
    if requested is True and not any(output.glob("checkpoint-*")):
        raise PlacedError(
            ("training", "resume_from_checkpoint"),
            f"is true, but {output} has no checkpoint; use auto to start a new run in that case",
        )
    if requested is not True and not Path(requested).is_dir():
        raise PlacedError(
            ("training", "resume_from_checkpoint"), f"must be a folder, auto or true, got {shown(requested)}"
        )


def make_folder(path: Path) -> None:
    """Create the folder of a run.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"training.output_dir cannot be created: {sentence_of(error)}") from error
