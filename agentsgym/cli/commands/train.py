"""``agentsgym train``: run training from a configuration file."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, out, plain, print_json, reported, usage_errors

if TYPE_CHECKING:
    from agentsgym.statistics.metrics import Evaluation


@reported
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="YAML configuration file, as created by `agentsgym new`.", show_default=False
        ),
    ],
    set_values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="KEY=VALUE",
            help="Override a value of CONFIG, as in training.max_steps=20 or environments.0.env_config.highest=8; "
            "VALUE is parsed as JSON if possible, and is otherwise a string. Repeatable.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move an earlier run in output_dir to NAME.1; nothing is deleted.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a policy: evaluate, warm-start, train, and evaluate again.

    A progress bar shows step, reward, win rate and remaining time; without a terminal, a line is printed every
    logging_steps steps. All results are written to output_dir, each evaluation as soon as it ends. Ctrl-C during the
    warm start or training keeps the policy trained so far: the final evaluation still runs, all files are still
    written, and the exit code is 1.

    With several processes or GPUs: accelerate launch -m agentsgym.cli.app train CONFIG.
    """
    from agentsgym.cli.players import quiet_transformers  # noqa: PLC0415
    from agentsgym.recipes.train import prepare  # noqa: PLC0415
    from agentsgym.reports.plots import can_plot  # noqa: PLC0415
    from agentsgym.reports.tables import comparison_table  # noqa: PLC0415

    quiet_transformers()
    # steps are logged if no progress bar can be shown
    logging.getLogger("agentsgym.observers.learning_curve").setLevel(logging.INFO)
    with usage_errors():
        prepared = prepare(config, overrides=options.key_values(set_values, "--set"), overwrite=overwrite)
    with contextlib.redirect_stdout(sys.stderr):  # only results go to standard output
        try:
            run = prepared.execute()
        except KeyboardInterrupt:
            raise FailureError(f"stopped; the files written so far are in {prepared.run.output}") from None
    if not run.is_main:
        return
    if as_json:
        print_json({"output_dir": str(run.output), **run.summary()})
    else:
        rows: dict[str, Evaluation] = {}
        for name, found in run.evaluations.items():
            rows |= {name: found, **{f"{name}, {env}": part for env, part in found.by_environment.items()}}
        out().print(plain(comparison_table(rows)), soft_wrap=True)
        names = [name for name in ("untrained", "before", "after") if name in run.evaluations]
        curve = ["learning_curve.png"] if can_plot() else []
        files = ", ".join(["model/", "summary.json", *curve, *(f"transcripts_{name}.txt" for name in names)])
        out().print(plain(f"\n{run.phases.total_seconds:.0f} s in total. Files in {run.output}: {files}"))
    if run.phases.status:
        raise typer.Exit(run.phases.status)
    if run.phases.interrupted:
        raise FailureError(f"stopped; the policy at that point is in {run.output / 'model'}")
