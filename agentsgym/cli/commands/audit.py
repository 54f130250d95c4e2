"""``agentsgym audit``: check stored rollouts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import print_json, print_text, remark, reported


@reported
def audit(
    path: options.StorePath,
    where: options.Where = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="PATH-OR-NAME", help="Tokenizer whose vocabulary must contain every token id."
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check stored rollouts for errors that would affect training.

    Token spans, masks, log-probabilities, rewards and messages are checked. The exit code is 1 if a problem is found
    or a file of the store cannot be read.
    """
    from agentsgym.cli.auditing import audit_store  # noqa: PLC0415
    from agentsgym.cli.players import tokenizer_of  # noqa: PLC0415
    from agentsgym.cli.stores import open_store  # noqa: PLC0415

    store = open_store(path, where)
    loaded = tokenizer_of(tokenizer)
    report, unknown = audit_store(store, None if loaded is None else len(loaded))
    for name in unknown:
        text = f"{name} is not a known environment, so it is not checked which turns and tokens its rewards belong to"
        remark(text, "yellow")
    if as_json:
        problems = [asdict(one) for one in report.problems]
        skipped: dict[str, Any] = {file.name: why for file, why in store.skipped.items()}
        print_json(asdict(report) | {"ok": report.ok and not skipped, "problems": problems, "skipped": skipped})
    else:
        print_text(str(report))
    if not report.ok or store.skipped:
        raise typer.Exit(1)
