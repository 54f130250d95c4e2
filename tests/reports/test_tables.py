"""Tables as they are printed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.reports.tables import comparison_table, text_table
from agentsgym.statistics.metrics import Estimate, Evaluation


def evaluation(**fields: Any) -> Evaluation:
    numbers: dict[str, Any] = {
        "win_rate": Estimate(mean=0.4121, low=0.37, high=0.4549),
        "reward": Estimate(mean=1.256, low=-0.5, high=1.31),
        "turns": Estimate(mean=6.54, low=6.4, high=6.66),
        "num_episodes": 512,
        "num_failed": 0,
        "stop_reasons": {},
        "trajectories": [],
    }
    return Evaluation(**(numbers | fields))


def test_the_comparison_shows_it_in_one_look() -> None:
    after = Estimate(mean=0.875, low=0.8411, high=1.0)
    table = comparison_table({"random": evaluation(), "after training": evaluation(win_rate=after, num_episodes=64)})
    assert table.splitlines() == [
        "agent           win rate   95% interval  turns  95% interval  reward   95% interval  episodes",
        "--------------  --------  -------------  -----  ------------  ------  -------------  --------",
        "random             41.2%   [37.0, 45.5]    6.5    [6.4, 6.7]    1.26  [-0.50, 1.31]       512",
        "after training     87.5%  [84.1, 100.0]    6.5    [6.4, 6.7]    1.26  [-0.50, 1.31]        64",
    ]


def test_failures_get_a_column_only_if_there_are_any() -> None:
    table = comparison_table({"a": evaluation(), "b": evaluation(num_failed=3)})
    assert table.splitlines()[0].endswith("episodes  failed")
    assert [line.split()[-1] for line in table.splitlines()[2:]] == ["0", "3"]
    assert "failed" not in comparison_table({"a": evaluation()})


def test_the_fraction_of_optimal_gets_a_column_only_if_it_is_known() -> None:
    placed = evaluation(fraction_of_optimal=Estimate(mean=0.8, low=0.75, high=0.851))
    table = comparison_table({"random": evaluation(), "trained": placed})
    assert table.splitlines()[0].endswith("of optimal  95% interval  episodes")
    assert [line.split()[-3:] for line in table.splitlines()[2:]] == [["1.31]", "-", "512"], ["[75.0,", "85.1]", "512"]]
    assert "of optimal" not in comparison_table({"random": evaluation()})


def test_what_was_not_computed_is_a_dash() -> None:
    (row,) = comparison_table({"a": evaluation(win_rate=None, turns=None)}).splitlines()[2:]
    assert row.split() == ["a", "-", "-", "1.26", "[-0.50,", "1.31]", "512"]


def test_nothing_is_printed_as_minus_zero() -> None:
    zero = Estimate(mean=-0.0, low=-0.004, high=-0.0001)
    (row,) = comparison_table({"a": evaluation(reward=zero, win_rate=zero, turns=zero)}).splitlines()[2:]
    assert row.split() == ["a", "0.0%", "[-0.4,", "0.0]", "0.0", "[0.0,", "0.0]", "0.00", "[0.00,", "0.00]", "512"]


def test_a_comparison_needs_an_evaluation() -> None:
    with pytest.raises(ValueError, match="must contain at least one evaluation"):
        comparison_table({})


def test_different_confidences_do_not_compare() -> None:
    with pytest.raises(ValueError, match=r"the same confidence level, got \[0\.9, 0\.95\]"):
        comparison_table({"a": evaluation(), "b": evaluation(confidence=0.9)})


cells = st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), min_size=1, max_size=8)


@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=5))
def test_columns_are_as_wide_as_their_widest_cell(rows: list[tuple[str, ...]]) -> None:
    header = ["name", "x", "y"]
    lines = text_table(header, rows).splitlines()
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(3)]
    assert {len(line) for line in lines} == {sum(widths) + 4}
    assert [line.split() for line in lines[2:]] == [list(row) for row in rows]


def test_a_row_with_a_missing_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        text_table(["a", "b"], [["only one"]])


def test_a_cell_is_one_short_line_that_no_terminal_obeys() -> None:
    table = text_table(["agent", "x"], [["\x1b[31mme\n\tand\x07 you", "1"], ["z" * 5000, "\r2"]])
    assert table.splitlines()[2].startswith("\\x1b[31mme\\n\\tand\\x07 you")
    assert len(table.splitlines()) == 4
    assert max(map(len, table.splitlines())) == 101 + 2 + 3
