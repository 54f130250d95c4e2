"""Foreign values and errors as short text: what repr names where that is short, and never an exception."""

import collections
import dataclasses
import json
import math
import pickle
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.texts import as_json, sentence_of, shortened, shown, visible
from agentsgym.types import StopReason, Turn

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(st.integers())
    ),
    max_leaves=12,
)


class Raising:
    """Its repr raises what it was made with."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


class MuteError(Exception):
    """Its text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclasses.dataclass
class Named:
    """A dataclass with a repr of its own."""

    value: int = 1

    def __repr__(self) -> str:
        return "mine"


@given(PLAIN)
def test_a_short_value_is_shown_as_repr_shows_it(value: Any) -> None:
    expected = repr(value)
    assert shown(value, limit=len(expected)) == expected


@given(PLAIN, st.integers(1, 30))
def test_a_long_value_is_cut(value: Any, limit: int) -> None:
    assert len(shown(value, limit=limit)) <= limit


@pytest.mark.parametrize(
    "value",
    [
        (1,), (), set(), frozenset(), {1}, frozenset({1}), StopReason.DONE, Named(), Turn(start=0, stop=2, reward=1.0),
        collections.OrderedDict(a=1), collections.deque([1]), math.nan, range(3), [Named()], b"\x00", bytearray(b"a"),
    ],
    ids=repr,
)  # fmt: skip
def test_other_values_are_shown_as_repr_shows_them(value: Any) -> None:
    assert shown(value, limit=500) == repr(value)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), GeneratorExit(), RecursionError()], ids=repr)
def test_a_repr_that_raises_is_reported(error: BaseException) -> None:
    output = f"<Raising object: its repr raised {type(error).__name__}>"
    assert shown(Raising(error)) == output
    assert shown({"state": [Raising(error)]}) == f"{{'state': [{output}]}}"


def test_an_interrupt_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        shown([Raising(KeyboardInterrupt())])


def test_megabytes_are_not_built() -> None:
    state = {"board": ["x" * 5_000_000] * 100, "seen": [list(range(1000))] * 100_000}
    state["again"] = [state]
    for value in (state, dataclasses.make_dataclass("Game", ["state"])(state), KeyError(state).args):
        tracemalloc.start()
        text = shown(value)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(text) == 200
        assert peak < 200_000


def test_no_depth_and_no_number_is_too_much() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "[[[[[[…]]]]]]"
    assert shown([10**10_000]) == "[<an int of 33220 bits>]"
    while nested:
        (nested,) = nested


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("gone"), "gone"),
        (ValueError(), ""),
        (ValueError("a", 1), "('a', 1)"),
        (KeyError("name"), "'name'"),
        (OSError(2, "no such file"), "[Errno 2] no such file"),
        (ValueError("a\n\x1b[2Jb\r"), "a\n\\x1b[2Jb\\r"),
        (MuteError(), "MuteError, whose text cannot be read: its __str__ raised RuntimeError"),
        (ValueError(Raising(ValueError())), "ValueError, whose text cannot be read: its __str__ raised ValueError"),
    ],
    ids=range(8),
)
def test_the_sentence_of_an_error(error: BaseException, sentence: str) -> None:
    assert sentence_of(error) == sentence
    assert len(sentence_of(type(error)("x" * 9999), 20)) <= 20 or isinstance(error, MuteError)


def test_the_sentence_of_an_error_that_holds_megabytes_is_short() -> None:
    error = KeyError({"state": "x" * 5_000_000})
    tracemalloc.start()
    assert len(sentence_of(error)) == 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_what_a_terminal_obeys_becomes_visible() -> None:
    text = "\x1b]0;title\x07 \x1b[31mred \x9b2J \r\b\x00\u202eabc\u2066\ud800 tab\tand\nnewline, é, 字, 👩‍👩‍👧"
    assert visible(text) == (
        "\\x1b]0;title\\x07 \\x1b[31mred \\x9b2J \\r\\x08\\x00\\u202eabc\\u2066\\ud800 tab\tand\nnewline, é, 字, 👩‍👩‍👧"
    )
    assert visible(visible(text)) == visible(text)
    visible(text).encode()


@given(st.text(st.characters(codec=None)))
def test_what_is_made_visible_can_be_printed(text: str) -> None:
    made = visible(text)
    assert made == visible(made)
    made.encode()
    assert not set(made) & set("\x1b\x07\r\b\x00\x9b\u202e")


@given(st.text(max_size=300), st.integers(64, 400), st.sampled_from([0.0, 0.3, 0.5]))
def test_a_shortened_text_is_as_short_as_requested(text: str, max_bytes: int, tail: float) -> None:
    cut = shortened(text, max_bytes, tail=tail)
    assert len(cut.encode(errors="backslashreplace")) <= max_bytes
    assert cut == text or "characters are omitted" in cut


def test_a_value_that_changes_while_it_is_shown_does_not_raise() -> None:
    class Growing(dict[str, int]):
        """Each key that is read adds another."""

        def items(self) -> Any:
            for key in super().items():
                self[str(len(self))] = 1
                yield key

    Growing.__repr__ = dict.__repr__  # type: ignore[method-assign]
    assert shown(Growing(a=1)).endswith("its repr raised RuntimeError>")


def test_errors_with_such_texts_travel_between_processes() -> None:
    assert str(pickle.loads(pickle.dumps(ValueError(shown("\ud800"))))) == "'\\ud800'"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner),
        max_leaves=20,
    )
)
def test_any_value_has_a_form_in_json(value: Any) -> None:
    plain = as_json(value)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert as_json(plain) == plain


def test_json_of_a_value_that_holds_itself_ends() -> None:
    inner: list[Any] = [1]
    inner += [inner, inner]
    first, second, third = as_json(inner)
    assert first == 1
    assert second == third == shown(inner)
    assert as_json({"n": 10**5000}) == {"n": f"<an int of {(10**5000).bit_length()} bits>"}
