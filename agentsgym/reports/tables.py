"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentsgym.statistics.metrics import Estimate, Evaluation
from agentsgym.texts import visible

_MAX_CELL_CHARS = 100


def comparison_table(evaluations: Mapping[str, Evaluation]) -> str:
    """Return a table that compares agents by win rate, turns and reward, each with its interval, one agent per row.

    It has a column for the fraction of optimal play if that is known for any agent, and for failed rollouts if there
    are any.

    Args:
        evaluations: Evaluations by agent name, in the order of the rows.

    Raises:
        ValueError: There are no evaluations, or their confidence levels differ.
    """
    if not evaluations:
        raise ValueError("evaluations must contain at least one evaluation")
    confidences = {evaluation.confidence for evaluation in evaluations.values()}
    if len(confidences) != 1:
        raise ValueError(f"all evaluations in a table must have the same confidence level, got {sorted(confidences)}")
    any_failed = any(evaluation.num_failed for evaluation in evaluations.values())
    any_fraction = any(evaluation.fraction_of_optimal for evaluation in evaluations.values())
    interval = f"{confidences.pop():.0%} interval"
    header = [
        "agent",
        "win rate",
        interval,
        "turns",
        interval,
        "reward",
        interval,
        *(["% of optimal", interval] if any_fraction else []),
        "episodes",
    ]
    rows = [
        [
            name,
            *_cells(evaluation.win_rate, "{:z.1%}"),
            *_cells(evaluation.turns, "{:z.1f}"),
            *_cells(evaluation.reward, "{:z.2f}"),
            *(_cells(evaluation.fraction_of_optimal, "{:z.1%}") if any_fraction else []),
            str(evaluation.num_episodes),
            *([str(evaluation.num_failed)] if any_failed else []),
        ]
        for name, evaluation in evaluations.items()
    ]
    return text_table(header + (["failed"] if any_failed else []), rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns: the first one to the left, the others to the right.

    Each cell is one line: newlines, control characters and escape sequences are escaped, and long cells are truncated.

    >>> print(text_table(["agent", "episodes"], [["random", "512"], ["me", "8"]]))
    agent   episodes
    ------  --------
    random       512
    me             8
    """
    names, *cells = [[_one_line(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines: list[str] = []
    for first, *others in (names, ["-" * width for width in widths], *cells):
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def _one_line(cell: str) -> str:
    text = visible(cell[:_MAX_CELL_CHARS]).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(cell) <= _MAX_CELL_CHARS else f"{text}…"


def _cells(estimate: Estimate | None, form: str) -> list[str]:
    if estimate is None:
        return ["-", ""]
    low, high = (form.format(bound).removesuffix("%") for bound in (estimate.low, estimate.high))
    return [form.format(estimate.mean), f"[{low}, {high}]"]
