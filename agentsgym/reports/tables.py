"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentsgym.evaluation.metrics import Estimate, Evaluation


def comparison_table(evaluations: Mapping[str, Evaluation]) -> str:
    """Compare agents in one look, one row each: win rate, turns and reward with their intervals, and how many episodes.

    Failed rollouts get a column if there are any.

    Args:
        evaluations: By the agent's name, in the order of the rows.

    Raises:
        ValueError: There is no evaluation, or they differ in confidence.
    """
    confidences = {evaluation.confidence for evaluation in evaluations.values()}
    if len(confidences) != 1:
        raise ValueError(f"a table compares evaluations of one confidence, got {sorted(confidences)}")
    any_failed = any(evaluation.num_failed for evaluation in evaluations.values())
    interval = f"{confidences.pop():.0%} interval"
    header = ["agent", "win rate", interval, "turns", interval, "reward", interval, "episodes"]
    rows = [
        [
            name,
            *_cells(evaluation.win_rate, "{:z.1%}"),
            *_cells(evaluation.turns, "{:z.1f}"),
            *_cells(evaluation.reward, "{:z.2f}"),
            str(evaluation.num_episodes),
            *([str(evaluation.num_failed)] if any_failed else []),
        ]
        for name, evaluation in evaluations.items()
    ]
    return text_table(header + (["failed"] if any_failed else []), rows)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns: the first to the left, the others to the right.

    Args:
        header: One name a column.
        rows: As many cells each.

    >>> print(text_table(["agent", "episodes"], [["random", "512"], ["me", "8"]]))
    agent   episodes
    ------  --------
    random       512
    me             8
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def _cells(estimate: Estimate | None, form: str) -> list[str]:
    if estimate is None:
        return ["-", ""]
    low, high = (form.format(bound).removesuffix("%") for bound in (estimate.low, estimate.high))
    return [form.format(estimate.mean), f"[{low}, {high}]"]
