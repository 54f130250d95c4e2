"""Which rollouts of a store a command is about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli.console import UsageError, usage
from agentsgym.cli.options import key_values

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

StorePath = Annotated[Path, typer.Argument(metavar="PATH", help="The folder of a rollout store.", show_default=False)]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="COLUMN=VALUE",
        help="Only rollouts with this value, as agent=random or success=false. Repeatable.",
    ),
]


def selected(path: Path, *wheres: tuple[str, list[str] | None]) -> RolloutStore:
    """Open a store and keep what passes.

    Args:
        path: The folder.
        *wheres: Options by name, with the conditions that they gave.

    Raises:
        UsageError: There is no such store, no such column, or no rollout that passes.
    """
    from agentsgym.errors import StoreError  # noqa: PLC0415
    from agentsgym.store.reader import RolloutStore  # noqa: PLC0415

    try:
        store = RolloutStore(path)
    except StoreError as error:
        raise UsageError(str(error)) from error
    if not store:
        raise UsageError(f"there is no rollout in {path}")
    for option, given in wheres:
        conditions = key_values(given, option)
        with usage():
            store = store.filter(**conditions) if conditions else store
        if not store:
            raise UsageError(f"{option}: no rollout of {path} has {' and '.join(given or ())}")
    return store
