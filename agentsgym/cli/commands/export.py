"""``agentsgym export``: export stored rollouts to other tools."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, out, reported, usage_errors
from agentsgym.errors import AgentsGymError, StoreError

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

_FORMATS = ("jsonl", "sft", "dpo", "kto", "inspect", "trackio")


@reported
def export(  # noqa: PLR0913, PLR0917  # options of a command
    path: options.StorePath,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(_FORMATS),
            help="Complete rollouts (jsonl), examples for TRL's trainers (sft, dpo, kto), Inspect logs, or trackio.",
            autocompletion=options.one_of(*_FORMATS),
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output file, which must not exist (not used with trackio). For inspect: FILE.eval, FILE.json or a "
            "folder.",
        ),
    ] = None,
    where: options.Where = None,
    min_reward: Annotated[
        float | None,
        typer.Option(
            "--min-reward",
            metavar="R",
            help="Treat rollouts with at least this reward as successful, regardless of info['success']; for sft and "
            "kto.",
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="Trackio project (created if missing).")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="NAME", help="Trackio run name (default: the name of the stored run or of the agent)."
        ),
    ] = None,
) -> None:
    """Export stored rollouts in full, as fine-tuning data, or for Inspect or trackio.

    jsonl: complete rollouts. sft: the conversations of successful rollouts. dpo: for a better and a worse rollout of
    each task, the first responses at which the two diverge. kto: every response, labeled by whether its rollout
    succeeded. inspect: conversations and scores, for `inspect view`. trackio: metrics by step, and every rollout as a
    trace, in trackio's database on this machine. Nothing is overwritten or uploaded.
    """
    from agentsgym.cli.stores import open_store  # noqa: PLC0415

    if to not in _FORMATS:
        raise UsageError(f"--to must be one of {', '.join(_FORMATS)}, got {to!r}")
    if min_reward is not None and to not in {"sft", "kto"}:
        raise UsageError("--min-reward is only valid with --to sft or --to kto")
    if to == "trackio" and (output is not None or not project):
        raise UsageError("--to trackio writes to trackio's database: it requires --project NAME and no --output")
    if to != "trackio" and (project is not None or run is not None):
        raise UsageError("--project and --run are only valid with --to trackio")
    if to != "trackio" and output is None:
        raise UsageError(f"--to {to} requires --output FILE")
    store = open_store(path, where)
    if output is None:
        with usage_errors():
            from agentsgym.export.trackio_export import export_to_trackio  # noqa: PLC0415

            runs = export_to_trackio(store, str(project), run)
        many = f"{len(runs)} runs" if len(runs) > 1 else f"run {runs[0]}"
        out().print(cell(f"wrote {len(store)} rollouts as {many} to trackio project {project}"), soft_wrap=True)
        out().print(cell(f"view them with: trackio show --project {shlex.quote(str(project))}"), soft_wrap=True)
    elif to == "inspect":
        _write_inspect(store, output)
    else:
        count = _write_lines(output, _lines(store, to, min_reward))
        what = "rollouts" if to == "jsonl" else "examples"
        out().print(cell(f"wrote {count} {what} of {len(store)} rollouts to {output}"), soft_wrap=True)


def _write_inspect(store: RolloutStore, path: Path) -> None:
    from agentsgym.export.inspect_logs import write_inspect_logs  # noqa: PLC0415

    try:
        with usage_errors():
            written = write_inspect_logs(store, path)
    except OSError as error:
        if isinstance(error, AgentsGymError):  # a StoreError, whose message names the file
            raise
        raise FailureError(f"{path} cannot be written: {error}") from error
    logs = "1 log" if len(written) == 1 else f"{len(written)} logs"
    out().print(cell(f"wrote {logs} of {len(store)} rollouts to {path}"), soft_wrap=True)


def _lines(store: RolloutStore, to: str, min_reward: float | None) -> Iterable[str]:
    from agentsgym.export import examples  # noqa: PLC0415
    from agentsgym.store.jsonl import record_to_line  # noqa: PLC0415

    if to == "jsonl":
        return map(record_to_line, store.records())
    if to == "sft":
        found = examples.sft_examples(store.records(), min_reward)
    elif to == "kto":
        found = examples.kto_examples(store.records(), min_reward)
    else:
        found = examples.dpo_examples(store.records())
    return (json.dumps(one, ensure_ascii=False) for one in found)


def _write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines to a new file, delete it if writing fails, and return the number of lines."""
    try:
        file = path.open("x", encoding="utf-8", errors="backslashreplace", newline="\n")  # lone surrogates
    except FileExistsError as error:
        raise UsageError(f"--output: {path} already exists") from error
    except OSError as error:
        raise UsageError(f"--output: {path} cannot be written: {error}") from error
    count = 0
    try:
        with file:
            for line in lines:
                file.write(f"{line}\n")
                count += 1
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise FailureError(f"{path} cannot be written: {error}") from error
        raise
    if not count:
        path.unlink()
        raise FailureError(
            "these rollouts contain no examples: sft requires successful rollouts, kto rollouts with a known outcome "
            "(or --min-reward), and dpo two rollouts of a task with different rewards"
        )
    return count
