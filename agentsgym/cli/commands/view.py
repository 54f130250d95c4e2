"""``agentsgym view``: view stored rollouts in the browser."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, out, print_json, remark, reported, usage_errors

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore


@reported
def view(  # noqa: PLR0913, PLR0917  # options of a command
    path: options.StorePath,
    where: options.Where = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write a single HTML page to FILE instead of serving one."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="Show only the N newest rollouts (default: 50000, or 1000 with --out)."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65535, help="Port on 127.0.0.1; 0 selects a free port.")
    ] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="A tokenizer.json file or its folder, for rollouts stored without a tokenizer.",
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the page's address or path, and the number of rollouts, as JSON.")
    ] = False,
) -> None:
    """View stored rollouts: conversations, per-token credit, task groups and learning curves.

    The page is served on this machine until Ctrl-C, or written to a self-contained file. It loads nothing from the
    network.
    """
    from agentsgym.cli.stores import open_store  # noqa: PLC0415
    from agentsgym.viewer.server import WRITTEN_LIMIT, write_page  # noqa: PLC0415

    if output is not None and port:
        raise UsageError("--port cannot be combined with --out, which writes a file instead of starting a server")
    store = open_store(path, where)
    if output is None:
        _serve(store, port, limit, tokenizer, no_open=no_open, as_json=as_json)
        return
    if output.exists():
        raise UsageError(f"--out: {output} already exists")
    shown = min(len(store), limit or WRITTEN_LIMIT)
    try:
        write_page(store, output, limit=shown, tokenizer=tokenizer)
        size = output.stat().st_size
    except OSError as error:
        raise FailureError(f"{output} cannot be written: {error.strerror or error}") from error
    if as_json:
        print_json({"path": str(output), "rollouts": shown, "total": len(store), "bytes": size})
        return
    _print(f"wrote {shown:,} rollouts to {output} ({size / 1e6:.1f} MB)")
    _remark_left_out(store, shown)


def _serve(
    store: RolloutStore, port: int, limit: int | None, tokenizer: Path | None, *, no_open: bool, as_json: bool
) -> None:
    import webbrowser  # noqa: PLC0415

    from agentsgym.viewer.server import SERVED_LIMIT, serve  # noqa: PLC0415

    shown = min(len(store), limit or SERVED_LIMIT)

    def ready(address: str) -> None:
        if as_json:
            print_json({"address": address, "rollouts": shown, "total": len(store)})
        else:
            _print(f"{shown:,} rollouts at {address}")
            _remark_left_out(store, shown)
            remark("press Ctrl-C to stop")
        if not no_open and not as_json and out().is_terminal:
            with contextlib.suppress(OSError, webbrowser.Error):  # the address is printed
                webbrowser.open(address)

    with usage_errors():
        serve(store, port=port, limit=shown, tokenizer=tokenizer, on_ready=ready)


def _print(text: str) -> None:
    out().print(cell(text), soft_wrap=True)
    out().file.flush()  # otherwise a pipe would delay the address


def _remark_left_out(store: RolloutStore, shown: int) -> None:
    if shown < len(store):
        agents: list[str | None] = store[: len(store) - shown].table(["agent"]).column("agent").to_pylist()
        left_out = ", ".join(f"{count:,} of {name or 'unknown'}" for name, count in Counter(agents).items())
        remark(f"showing the newest {shown:,} of {len(store):,}, without {left_out}; use --limit to show more")
