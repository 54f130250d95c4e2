"""``agentsgym compare``: compare two runs, task by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentsgym.cli import options
from agentsgym.cli.console import FailureError, UsageError, cell, new_table, out, print_json, reported

if TYPE_CHECKING:
    from agentsgym.evaluation.compare import Comparison


@reported
def compare(  # noqa: PLR0913, PLR0917  # options of a command
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a rollout store.", show_default=False)],
    run_b: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN_B",
            help="Folder of the second rollout store (default: RUN_A, split by --where-a and --where-b).",
            show_default=False,
        ),
    ] = None,
    where: options.Where = None,
    where_a: Annotated[
        list[str] | None,
        typer.Option("--where-a", metavar="COLUMN=VALUE", help="Like --where, but only for RUN_A. Repeatable."),
    ] = None,
    where_b: Annotated[
        list[str] | None,
        typer.Option("--where-b", metavar="COLUMN=VALUE", help="Like --where, but only for RUN_B. Repeatable."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=0, help="Maximum number of tasks to list.")
    ] = 20,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Random seed for the confidence intervals.")
    ] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Compare two runs, or two agents of one run, on their shared tasks, and list the tasks whose results differ.

    The differences are RUN_B minus RUN_A, with 95% confidence intervals (resampling the shared tasks).
    """
    from agentsgym.cli.stores import open_store  # noqa: PLC0415
    from agentsgym.evaluation.compare import compare as compared  # noqa: PLC0415

    if (run_b is None or run_b.resolve() == run_a.resolve()) and (where_a or []) == (where_b or []):
        raise UsageError("a run cannot be compared with itself: pass a second store, or use --where-a and --where-b")
    first = open_store(run_a, [*(where or ()), *(where_a or ())])
    second = open_store(run_b or run_a, [*(where or ()), *(where_b or ())])
    comparison = compared(first, second, seed=seed)
    if as_json:
        print_json(comparison.as_dict())
    else:
        _show_differences(comparison)
        _show_changed_tasks(comparison, limit)
    if not comparison.tasks:
        raise FailureError("the runs share no tasks, that is, none with the same environment, task_data and seed")


def _show_differences(comparison: Comparison) -> None:
    table = new_table()
    for name in ("", "A", "B", "B - A", "95% interval"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name)
    for name, estimate, form in (("win rate", comparison.win_rate, "z.1%"), ("reward", comparison.reward, "z.2f")):
        if estimate is not None:
            interval = "-"
            if estimate.low is not None and estimate.high is not None:
                interval = f"[{estimate.low:+{form}}, {estimate.high:+{form}}]"
            values = f"{estimate.a:{form}}", f"{estimate.b:{form}}", f"{estimate.difference:+{form}}"
            table.add_row(name, *values, interval)
    number = len(comparison.tasks)
    out().print(cell(f"{number} shared task{'' if number == 1 else 's'}", "bold"))
    if number:
        out().print(table)
    if number > 1 and comparison.reward is not None and comparison.reward.low is None:
        out().print(cell("no interval for the reward: it differs by the same amount in every task"), style="dim")


def _show_changed_tasks(comparison: Comparison, limit: int) -> None:
    from agentsgym.store.values import to_json  # noqa: PLC0415

    changed = comparison.changed
    lost = sum(task.change < 0 for task in changed)
    out().print(cell(f"tasks whose results differ: {lost} worse, {len(changed) - lost} better"))
    for task in changed[:limit]:
        wins = " -> ".join(
            f"{round(share * number)}/{number}"
            for share, number in ((task.wins_a or 0.0, task.num_a), (task.wins_b or 0.0, task.num_b))
        )
        env = f"{task.env.rpartition('.')[2]} " if task.env else ""
        text = json.dumps(json.loads(to_json(task.task_data)), ensure_ascii=False)
        how = "worse" if task.change < 0 else "better"
        rewards = f"{task.reward_a:z.2f} -> {task.reward_b:z.2f}"
        out().print(cell(f"{how} {wins}, reward {rewards}: {env}{text}"), soft_wrap=True)
    if len(changed) > limit:
        out().print(cell(f"and {len(changed) - limit} more (use --limit to list more)"), style="dim")
    only = f"tasks only in A: {comparison.num_only_a}, only in B: {comparison.num_only_b}"
    failed = f"failed rollouts (excluded): {comparison.num_failed_a} in A, {comparison.num_failed_b} in B"
    for line in (only, failed):
        out().print(cell(line), style="dim")
