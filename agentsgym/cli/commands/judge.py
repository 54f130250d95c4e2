"""``agentsgym judge``: compare a judge with labels."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from agentsgym.cli import options
from agentsgym.cli.console import (
    FailureError,
    UsageError,
    cell,
    err,
    new_table,
    out,
    print_json,
    reported,
    usage_errors,
)

if TYPE_CHECKING:
    from agentsgym.evaluation.judge_agreement import Agreement
    from agentsgym.judging.judge import Judge
    from agentsgym.statistics.intervals import Estimate

_MAX_FAILURES = 5  # that are listed


@reported
def judge(
    labels: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help='Labels: a JSON object per line, with "messages" (or "candidates") and "labels" by criterion.',
            show_default=False,
        ),
    ],
    name: Annotated[
        str, typer.Option("--judge", metavar="FILE.py:NAME", help="The judge: a variable of a Python file.")
    ],
    min_kappa: Annotated[
        float | None,
        typer.Option("--min-kappa", metavar="K", help="Fail if Cohen's kappa of a criterion is below K.", max=1.0),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Compare a judge with labels, before its scores are used for training.

    For each criterion: accuracy, Cohen's kappa (0 is chance, 1 perfect agreement) and, for judges of groups, the bias
    for the first candidate, with 95% confidence intervals.
    """
    from agentsgym.evaluation.judge_agreement import judge_agreement, read_labels  # noqa: PLC0415

    with usage_errors():
        found = _judge_of_file(name)
        items = read_labels(labels, found)
    if not as_json:
        err().print(cell(f"judging {len(items)} items with {found!r}", "dim"))
    agreement = judge_agreement(found, items, seed=seed)
    if as_json:
        print_json({**asdict(agreement), "failures": {str(line): why for line, why in agreement.failures.items()}})
    else:
        _show(agreement)
    if len(agreement.failures) == agreement.num_items:
        raise FailureError("the judge failed on every item")
    for one in agreement.criteria if min_kappa is not None else ():
        if one.kappa is None or one.kappa.mean < cast("float", min_kappa):
            value = "undefined" if one.kappa is None else f"{one.kappa.mean:z.2f}"
            raise FailureError(f"kappa of {one.name!r} is {value}, below --min-kappa {min_kappa:g}")


def _judge_of_file(name: str) -> Judge:
    from agentsgym.envs.datasets.naming import module_of_file  # noqa: PLC0415
    from agentsgym.judging.judge import Judge  # noqa: PLC0415

    file, colon, variable = name.partition(".py:")
    path = f"{file}.py" if colon else name
    if not path.endswith(".py"):
        raise UsageError(f"--judge must be FILE.py:NAME, got {name!r}")
    values = cast("dict[str, Any]", vars(module_of_file(Path(path))))
    found = {key: value for key, value in values.items() if isinstance(value, Judge)}
    if variable in found:
        return found[variable]
    if not variable and len(found) == 1:
        return next(iter(found.values()))
    known = f"it has {', '.join(found)}" if found else "it has none"
    wanted = f"no judge {variable!r}" if variable else "not exactly one judge, so name one with FILE.py:NAME"
    raise UsageError(f"{path} has {wanted}; {known}")


def _show(agreement: Agreement) -> None:
    has_groups = any(one.first_preferred is not None for one in agreement.criteria)
    table = new_table()
    names = ["criterion", "labels", "accuracy", "kappa"] + ["prefers the first", "consistent"] * has_groups
    for name in names:
        table.add_column(name, justify="left" if name == "criterion" else "right")
    for one in agreement.criteria:
        cells = [one.name, str(one.num), _cell(one.accuracy, "z.1%"), _cell(one.kappa, "z.2f")]
        if has_groups:
            cells += [_cell(one.first_preferred, "z.1%"), _cell(one.consistent, "z.1%")]
        table.add_row(*map(cell, cells))
    out().print(table)
    tokens = "" if agreement.tokens is None else f", {agreement.tokens:,} tokens"
    cost = f"{agreement.calls:,} calls, {agreement.cached:,} cached{tokens}, {agreement.seconds:.1f} s"
    out().print(cell(f"{agreement.num_items} items, {len(agreement.failures)} failed; {cost}"), style="dim")
    for line, why in [*agreement.failures.items()][:_MAX_FAILURES]:
        out().print(cell(f"line {line}: {why}"), soft_wrap=True)
    if len(agreement.failures) > _MAX_FAILURES:
        out().print(cell(f"and {len(agreement.failures) - _MAX_FAILURES} more"), style="dim")


def _cell(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "undefined"
    return f"{estimate.mean:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"
