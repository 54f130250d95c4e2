"""``agentsgym check``: check that an environment fulfills its contract, by playing it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from agentsgym.cli import options
from agentsgym.cli.console import cell, out, print_json, print_text, reported, usage_errors


@reported
def check(  # noqa: PLR0913, PLR0917  # options of a command
    environment: options.Environment,
    config: options.Config = None,
    config_file: options.ConfigFile = None,
    tasks: options.TaskFile = None,
    dataset: options.DatasetOptions = None,
    agent: options.AgentName = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH-OR-NAME",
            help="Model or tokenizer; if given, its tokenization and chat template are checked too.",
        ),
    ] = None,
    max_tasks: Annotated[
        int, typer.Option("--max-tasks", metavar="N", min=1, help="Maximum number of tasks to play.")
    ] = 6,
    limit_s: Annotated[
        float | None,
        typer.Option("--limit-s", metavar="SECONDS", min=0.001, help="Time limit for playing all tasks, in seconds."),
    ] = 300.0,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Play a few tasks one by one, concurrently, and in a pickled copy; report problems that affect training.

    Without --agent, a built-in agent takes exploratory random actions (not ENV's own random agent). The exit code is 1
    if an error is found, or with --strict if a warning is found.
    """
    from agentsgym.cli.players import PlayerOptions, make_player, tokenizer_of  # noqa: PLC0415
    from agentsgym.cli.tasks import tasks_for  # noqa: PLC0415
    from agentsgym.envs.check.run import check_env  # noqa: PLC0415

    named = options.find_env(environment, options.env_config(config, config_file))
    with usage_errors():
        player = None if agent is None else make_player(agent, named, PlayerOptions(seed=seed))
        env: Any = named.build(tokenizer_of(tokenizer)) if player is None or tokenizer else player.env
    found = tasks_for(
        env,
        path=tasks,
        split="train",
        options={**named.dataset_options, **options.key_values(dataset, "--dataset")},
        most=max_tasks,
        seed=seed,
    )
    report = check_env(
        env,
        found,
        None if player is None else player.agent,
        seed=seed,
        max_tasks=max_tasks,
        raise_on=None,
        limit_s=limit_s,
    )
    failed = bool(report.findings if strict else report.errors)
    if as_json:
        print_json({
            "environment": environment,
            "ok": not failed,
            "num_episodes": report.num_episodes,
            "num_turns": report.num_turns,
            "findings": [asdict(one) for one in report.findings],
        })  # fmt: skip
    else:
        for finding in report.findings:
            color = "red" if finding.severity == "error" else "yellow"
            out().print(cell(f"{finding.severity} [{finding.check}] {finding.place}", f"bold {color}"))
            print_text(f"  {finding.text}")
        num_errors = len(report.errors)
        num_warnings = len(report.findings) - num_errors
        counts = "no problems" if not report.findings else f"{num_errors} errors and {num_warnings} warnings"
        played = f"{report.num_episodes} episodes, {report.num_turns} turns"
        out().print(cell(f"{environment}: {counts} in {played}", "red" if num_errors else "green"))
    if failed:
        raise typer.Exit(1)
