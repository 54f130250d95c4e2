"""Answers are found where they stand, and only there."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.ReasoningEvals.extraction import (
    EXTRACTORS,
    extract_answer,
    gold_answer,
    in_box,
    last_number,
    strip_wrappers,
)
from agentsgym.envs.shared.numbers import as_number, canonical


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("tag", "<answer>3</answer> no, <answer> **4**. </answer>", "4"),
        ("tag", "<answer>3", None),
        ("tag", "<answer></answer>", None),
        ("boxed", r"\boxed{3} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        ("boxed", r"\boxed {7} \boxed{8", "7"),
        ("boxed", r"{ \boxed{$9$} and }}} {", "9"),
        ("boxed", "boxed{3}", None),
        ("hashes", "5 + 13\n#### 18\nSo it is.", "18"),
        ("hashes", "#### 1,250.", "1,250"),
        ("hashes", "none", None),
        ("choice", "(A) is wrong, so the answer is (B).", "B"),
        ("choice", "Answer: **C**", "C"),
        ("choice", "D", "D"),
        ("choice", "B. Paris", "B"),
        ("choice", "It is (A), or rather (C)", "C"),
        ("choice", "(A) (B)", "B"),
        ("choice", "(A) Paris", "A"),
        ("choice", "A. Vitamin (C)", "A"),
        ("choice", "b", "B"),
        ("choice", "(b).", "B"),
        ("choice", "I'd pick B.", "B"),
        ("choice", "Not option A: option **B** it is", "B"),
        ("choice", "The option I like", None),
        ("choice", "The answer is option C", "C"),
        ("choice", "The answer is a cat", None),
        ("choice", "Answer: a", "A"),
        ("choice", "**Answer:** C", "C"),
        ("choice", "Answer B.", "B"),
        ("choice", "Thus, C.", "C"),
        ("choice", "A is wrong, so B.", "B"),
        ("choice", "The answer is definitely C", "C"),
        ("choice", "the best answer would be C", "C"),
        ("choice", "Answer A or B? I go with B", "B"),
        ("choice", "The answer is A or B", None),
        ("choice", "so I think", None),
        ("choice", "A cat sat on the mat", None),
        ("number", "first 3, then -1,250.5 dollars.", "-1,250.5"),
        ("number", "3/4 of it", "3/4"),
        ("number", "$18.", "$18"),
        ("number", "v2 and x3", None),
        ("number", "about 1e6 of them", "1e6"),
        ("number", "2.5e-3 or so", "2.5e-3"),
        ("number", "it has 1 000 000 people", "1 000 000"),
        ("number", "from 3 to 4", "4"),
        ("number", "x = - 5", "-5"),
        ("number", "- 5", "-5"),
        ("number", "x = \u2212 .5 m", "\u2212.5"),
        ("number", "10 - 5", "5"),
        ("number", "x = 10 - 5", "5"),
        ("line", " north ", "north"),
        ("line", "a\nb", None),
    ],
)
def test_an_extractor_finds_its_form(name: str, text: str, answer: str | None) -> None:
    assert EXTRACTORS[name](text) == answer


@pytest.mark.parametrize(
    ("message", "kind", "is_cut", "answer"),
    [
        (r"\boxed{3} <answer>4</answer> 5", "number", False, "4"),
        ("so 3 + 4 = 7", "number", False, "7"),
        ("so 3 + 4 = 7", "number", True, None),
        (r"\boxed{7} and", "number", True, "7"),
        (r"\boxed{B. Paris}", "choice", False, "B"),
        ("I do not know", "choice", False, None),
        ("north", "text", False, "north"),
        ("I think\nnorth", "text", False, None),
    ],
)
def test_auto_takes_explicit_forms_first(message: str, kind: Any, is_cut: bool, answer: str | None) -> None:
    assert extract_answer(message, kind, is_cut=is_cut) == answer


@given(st.text(alphabet="{}\\boxed 1a", max_size=60), st.text(alphabet="ab1\\{} ", max_size=20))
def test_the_last_closed_box_is_found_behind_anything(before: str, inner: str) -> None:
    if inner.count("{") == inner.count("}") == 0 and "\\" not in inner and strip_wrappers(inner):
        assert EXTRACTORS["boxed"](f"{before} \\boxed{{{inner}}}") == strip_wrappers(inner)


@given(st.text(alphabet="{}\\boxed$.1a", max_size=200))
def test_any_text_can_be_searched(text: str) -> None:
    for extractor in EXTRACTORS.values():
        answer = extractor(text)
        assert answer is None or (answer and strip_wrappers(answer) == answer)


def test_a_long_text_of_open_boxes_takes_no_long_time() -> None:
    assert in_box("\\boxed{" * 200_000) is None


@pytest.mark.parametrize(
    ("solution", "answer"), [("2 + 2 = 4\n#### 4", "4"), (r"Thus \boxed{\sqrt{2}}.", r"\sqrt{2}"), (" Paris ", "Paris")]
)
def test_a_solution_is_cut_down_to_its_answer(solution: str, answer: str) -> None:
    assert gold_answer(solution) == answer


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("1,000", "1000.0", True),
        ("3/4", "0.75", True),
        (r"\frac{3}{4}", r"\dfrac{6}{8}", True),
        (r"-\frac{1}{2}", "-.5", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.3333", False),
        ("1000000000000", "1000000000001", False),
        ("$18", r"\$18", True),
        ("18", "19", False),
        ("0.0000005", "0", False),
        ("0.0000005", "5e-7", True),
        ("1e6", "1 000 000", True),
        ("1e6", "1", False),
        ("1/30", "0.033333", True),
        ("1/30", "0.0334", False),
        ("0.000001", "0.000002", False),
        (r"1\,000\,000", "1{,}000{,}000", True),
        ("1\u202f000", "1000", True),
        ("\u2212 5", "-5", True),
        ("-$5", "$-5", True),
    ],
)
def test_numbers_are_compared_by_value(one: str, other: str, are_equal: bool) -> None:
    first, second = as_number(one), as_number(other)
    assert first is not None
    assert second is not None
    assert first.equals(second) == are_equal


@pytest.mark.parametrize(
    "text",
    ["", "x", "1 8", "1,00", "1/0", "1e9999999", "1e-9999", "1 00", "1,000 000", "٣x", "9" * 401, "nan", "1.2.3"],
)
def test_other_texts_are_no_numbers(text: str) -> None:
    assert as_number(text) is None


SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


@given(
    st.decimals(-9999, 9999, places=3),
    st.sampled_from([*SCALES]),
    st.sampled_from(["{} {}", "${} {}s", r"{}\text{{ {}}}"]),
)
def test_a_scaled_number_is_the_product_and_no_other(number: Decimal, scale: str, form: str) -> None:
    written = form.format(number, scale)
    scaled = as_number(written)
    assert scaled is not None
    assert scaled.value == Fraction(number) * SCALES[scale]
    assert canonical(written) == str(scaled.value)
    for other in [as_number(str(number)), *(as_number(f"{number} {one}") for one in SCALES if one != scale)]:
        assert other is not None
        assert scaled.equals(other) == (number == 0)


@given(
    st.integers(0, 10**6), st.sampled_from([*SCALES]), st.sampled_from(["", " people", ".", "s of them", ", no more"])
)
def test_the_last_number_keeps_the_word_that_scales_it(number: int, scale: str, behind: str) -> None:
    found = last_number(f"Of 7 cities it has {number} {scale}{behind}")
    assert found is not None
    read = as_number(found)
    assert read is not None
    assert read.value == number * SCALES[scale]


@pytest.mark.parametrize(
    ("message", "number"),
    [("They are 3 millionaires", "3"), ("3,\nmillion", "3"), ("3\nMillions of them", "3"), ("3 dozen", "3")],
)
def test_other_words_behind_the_last_number_do_not_scale_it(message: str, number: str) -> None:
    assert last_number(message) == number


@pytest.mark.parametrize(
    "text", ["million", "2 millionth", "1,5,5 million", "2 million 5", "2 to 3 million", "2 dozen"]
)
def test_what_is_not_one_scaled_number_is_no_number(text: str) -> None:
    assert as_number(text) is None


@given(st.text(max_size=30))
def test_the_canonical_form_is_its_own(text: str) -> None:
    once = canonical(text)
    assert canonical(once) == canonical(canonical(once))
