"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentsgym.statistics.metrics import Estimate, Evaluation
from agentsgym.texts import visible

_MOST_CHARACTERS = 100  # of a cell


def comparison_table(evaluations: Mapping[str, Evaluation]) -> str:
    """Compare agents, one row each: win rate, turns and reward with their intervals, and the number of episodes.

    The fraction of optimal play gets a column if it is known for any agent, and failed rollouts if there are any.

    Args:
        evaluations: Evaluations by agent name, in the order of the rows.

    Raises:
        ValueError: There are no evaluations, or they differ in confidence.
    """
    confidences = {evaluation.confidence for evaluation in evaluations.values()}
    if len(confidences) != 1:
        raise ValueError(f"evaluations in a table must have the same confidence, got {sorted(confidences)}")
    any_failed = any(evaluation.num_failed for evaluation in evaluations.values())
    any_placed = any(evaluation.fraction_of_optimal for evaluation in evaluations.values())
    interval = f"{confidences.pop():.0%} interval"
    header = [
        "agent",
        "win rate",
        interval,
        "turns",
        interval,
        "reward",
        interval,
        *(["of optimal", interval] if any_placed else []),
        "episodes",
    ]
    rows = [
        [
            name,
            *_cells(evaluation.win_rate, "{:z.1%}"),
            *_cells(evaluation.turns, "{:z.1f}"),
            *_cells(evaluation.reward, "{:z.2f}"),
            *(_cells(evaluation.fraction_of_optimal, "{:z.1%}") if any_placed else []),
            str(evaluation.num_episodes),
            *([str(evaluation.num_failed)] if any_failed else []),
        ]
        for name, evaluation in evaluations.items()
    ]
    return text_table(header + (["failed"] if any_failed else []), rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns: the first to the left, the others to the right.

    A cell is one line: line ends, control characters and escape sequences are written out; long ones are truncated.

    Args:
        header: The names of the columns.
        rows: The rows, each with as many cells.

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
    text = visible(cell[:_MOST_CHARACTERS]).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(cell) <= _MOST_CHARACTERS else f"{text}…"


def _cells(estimate: Estimate | None, form: str) -> list[str]:
    if estimate is None:
        return ["-", ""]
    low, high = (form.format(bound).removesuffix("%") for bound in (estimate.low, estimate.high))
    return [form.format(estimate.mean), f"[{low}, {high}]"]
