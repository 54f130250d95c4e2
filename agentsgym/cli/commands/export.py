"""``agentsgym export``: export stored rollouts in full, or as fine-tuning data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, out, reported
from agentsgym.errors import StoreError
from agentsgym.removed import REMOVED

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

_FORMATS = ("jsonl", "sft", "dpo", "kto")


@reported
def export(  # options of a command
    path: options.StorePath,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(_FORMATS),
            help="Complete rollouts (jsonl), or examples for TRL's trainers (sft, dpo, kto).",
            autocompletion=options.one_of(*_FORMATS),
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Output file, which must not exist.")
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
    trackio_name: Annotated[str | None, typer.Option("--project", "--run", hidden=True)] = None,
) -> None:
    """Export stored rollouts in full, or as fine-tuning data.

    jsonl: complete rollouts. sft: the conversations of successful rollouts. dpo: for a better and a worse rollout of
    each task, the first responses at which the two diverge. kto: every response, labeled by whether its rollout
    succeeded. Nothing is overwritten.
    """
    from agentsgym.cli.stores import open_store  # noqa: PLC0415

    removed = REMOVED.get("export trackio" if trackio_name is not None else f"export {to}")
    if removed is not None:
        raise UsageError(removed)
    if to not in _FORMATS:
        raise UsageError(f"--to must be one of {', '.join(_FORMATS)}, got {to!r}")
    if min_reward is not None and to not in {"sft", "kto"}:
        raise UsageError("--min-reward is only valid with --to sft or --to kto")
    if output is None:
        raise UsageError(f"--to {to} requires --output FILE")
    store = open_store(path, where)
    count = _write_lines(output, _lines(store, to, min_reward))
    what = "rollouts" if to == "jsonl" else "examples"
    out().print(cell(f"wrote {count} {what} of {len(store)} rollouts to {output}"), soft_wrap=True)


def _lines(store: RolloutStore, to: str, min_reward: float | None) -> Iterable[str]:
    from agentsgym.export import dpo_examples, kto_examples, sft_examples  # noqa: PLC0415
    from agentsgym.store.records import record_to_line  # noqa: PLC0415
    from agentsgym.store.runs import check_one_run  # noqa: PLC0415

    if to == "jsonl":
        return map(record_to_line, store.records())
    check_one_run(store.filter(source="training").table(["run"]), "the rollouts to export are")
    examples = {"sft": sft_examples, "kto": kto_examples}
    found = examples[to](store.records(), min_reward) if to in examples else dpo_examples(store.records())
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
