"""``agentsgym new``: the files of an environment of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentsgym.cli.console import cell, out, reported


@reported
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the class, as in GuessAWord.", show_default=False)],
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where the files are written.")] = Path(),
) -> None:
    """Write an environment that runs, its test, and a configuration to train it.

    Nothing is overwritten.
    """
    from agentsgym.cli.files import files_of, names_from, write_files  # noqa: PLC0415

    names = names_from(name)
    paths = write_files(folder, files_of(names))
    for path in paths:
        out().print(cell(f"wrote {path}"))
    source = paths[0]
    out().print("\nTry it:")
    for command in (
        f"agentsgym check {source}:{names.class_name}",
        f"agentsgym play {source}:{names.class_name}",
        f"agentsgym eval {source}:{names.class_name} --agent random",
        f"agentsgym train {paths[2]}",
    ):
        out().print(cell(f"  {command}", "bold"), soft_wrap=True)
