"""The scorecard in the documentation is what the script computes."""

from __future__ import annotations

import pytest

from benchmarks.credit_scorecard import BEGIN, BIASED, END, EXACT, PAGE, Row, bandit, line, page_with, pair_cells, score

ROWS = [*EXACT, *BIASED]
PUBLISHED = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()
rows = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])


def published(row: Row) -> str:
    """The line of the page that is about a row."""
    [found] = [entry for entry in PUBLISHED if entry.startswith(f"| {row.name} |")]
    return found


def test_the_page_has_these_rows_and_no_others() -> None:
    names = [entry.split(" | ")[0].removeprefix("| ") for entry in PUBLISHED[2:] if not entry.startswith("| **")]
    assert names[: len(ROWS)] == [row.name for row in ROWS]


@rows
def test_pairs_are_as_published(row: Row) -> None:
    assert published(row).split(" | ")[1:3] == pair_cells(row)


@pytest.mark.parametrize("row", ROWS[::9], ids=[row.name for row in ROWS[::9]])
def test_whole_rows_are_as_published(row: Row) -> None:
    assert published(row) == line(row)


def test_the_bandit_is_as_published() -> None:
    assert PUBLISHED[-len(bandit()) :] == bandit()


@rows
def test_the_halves_of_the_table_are_what_they_claim(row: Row) -> None:
    off = score(row, 2, 3).fit.off
    assert off < 1e-12 if row in EXACT else off > 1e-4


def test_writing_replaces_what_stands_between_the_markers() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert page_with(page, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert page_with(page_with(page, "other"), "new") == page_with(page, "new")
