"""Exact match and F1, against values worked out by hand and the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.Search.env import exact_match, f1, normalized


@pytest.mark.parametrize(
    ("answer", "references", "match", "overlap"),
    [
        ("The Tarn.", ["tarn"], 1.0, 1.0),
        ("river tarn", ["Tarn"], 0.0, 2 / 3),
        ("Tarn", ["Velda", "an Tarn!"], 1.0, 1.0),
        ("Belmora", ["Tarn"], 0.0, 0.0),
        ("one two two", ["two two three"], 0.0, 2 / 3),  # words count as often as in both: 2 of 3 and 2 of 3
        ("", ["Tarn"], 0.0, 0.0),
        ("The", ["A"], 0.0, 0.0),  # normalization would leave nothing of both
        ("The", ["the"], 1.0, 1.0),
    ],
)
def test_answers_score_as_worked_out(answer: str, references: list[str], match: float, overlap: float) -> None:
    assert exact_match(answer, references) == match
    assert f1(answer, references) == pytest.approx(overlap)


@given(st.text(), st.text())
def test_scores_are_bounded_symmetric_and_agree_on_equality(one: str, other: str) -> None:
    assert normalized(normalized(one)) == normalized(one) or "a" in one.lower()  # "tahe" may hold an article anew
    assert 0.0 <= f1(one, [other]) <= 1.0
    assert f1(one, [other]) == pytest.approx(f1(other, [one]))
    assert exact_match(one, [other]) == exact_match(other, [one])
    if exact_match(one, [other]) and normalized(one):
        assert f1(one, [other]) == pytest.approx(1.0)
