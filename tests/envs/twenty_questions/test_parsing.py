from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentsgym.envs.TwentyQuestions.gamemaster import load_reader
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.envs.TwentyQuestions.parsing import Fault, Guess, Question, core, normalize

READER = load_reader()
OBJECTS = load_knowledge().objects
NAMES = [(name, known.name) for known in OBJECTS.values() for name in known.names if name != "orange"]
FORMS = [
    "Is it {a}{x}?",
    "[{x}]",
    "[{a}{x}]",
    "My final guess is: {a}{x}",
    "my guess is {x}.",
    "Is it the {x}?",
    "Could it be {a}{x}?",
    "Are you thinking of {a}{x}?",
    "{x}",
    "I think it's {a}{x}!",
    "The answer is {a}{x}.",
    "Okay, so. Is it {a}{x}?",
    "Is it [{x}]?",
    "Is it {a}{x}? [{x}]",
    "Final guess: **{x}**",
]


@pytest.mark.parametrize("form", FORMS)
def test_every_name_of_every_object_is_guessed_in_every_form(form: str) -> None:
    for name, target in NAMES:
        article = "an " if name[0] in "aeiou" else "a "
        for text in (form.format(a=article, x=name), form.format(a="", x=name).upper()):
            assert READER.parse(text, target) == Guess(name=target), text


@pytest.mark.parametrize(
    "text",
    [
        "Is it a clock radio?",
        "Is it clockwork?",
        "Is it like a clock?",
        "Is there a clock in it?",
        "Is it a mammal?",
        "Is it used with a clock?",
        "Is it big?",
        "Is it a kind of dog?",
        "Is it made in a car?",
        "Is it a living thing?",
        "Is it an animal?",
        "What is it?",
        "Is it a wooden chair?",
        "Is it zinc?",
    ],
)
def test_questions_that_are_no_guess(text: str) -> None:
    assert isinstance(READER.parse(text), Question)


@pytest.mark.parametrize(
    "text", ["Is it a zeppelin?", "[zeppelin]", "My final guess is: a zeppelin", "Is it zeppelin?"]
)
def test_unknown_objects_can_be_guessed(text: str) -> None:
    expected = Question(text="is it zeppelin") if text == "Is it zeppelin?" else Guess(name="zeppelin")
    assert READER.parse(text) == expected
    assert READER.parse(text, "zeppelin") == Guess(name="zeppelin")
    assert READER.parse("Is it zeppelins?", "zeppelin") == Guess(name="zeppelin")


@pytest.mark.parametrize("text", ["Is it a fish?", "Is it fish?", "fish?", "Could it be a fish?", "[Is it a fish?]"])
def test_a_name_of_a_kind_is_a_question_unless_it_is_the_secret(text: str) -> None:
    move = READER.parse(text, "shark")
    assert isinstance(move, Question)
    assert move.name == "fish"
    assert READER.parse(text, "fish") == Guess(name="fish")


@pytest.mark.parametrize("text", ["Is an apple?", "is apple", "Is a apple?"])
def test_a_guess_that_lacks_the_pronoun_is_a_guess(text: str) -> None:
    assert READER.parse(text) == Guess(name="apple")
    assert READER.parse("Is an apple bigger than it?") == Question(text="is an apple bigger than it")


@pytest.mark.parametrize("text", ["[fish]", "My final guess is: a fish", "fish"])
def test_a_name_of_a_kind_that_is_marked_as_a_guess_is_one(text: str) -> None:
    assert READER.parse(text, "shark") == Guess(name="fish")


def test_a_list_of_objects_names_none_of_them() -> None:
    for text in (
        "[clock, dog, cat]",
        "[clock dog]",
        "My final guess is: a clock or a dog",
        "my guess is clock dog cat",
    ):
        move = READER.parse(text)
        assert isinstance(move, Guess)
        assert move.name not in OBJECTS


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", Fault.EMPTY),
        (" \n\t", Fault.EMPTY),
        ("?!", Fault.EMPTY),
        ("Is it alive? Is it big?", Fault.SEVERAL),
        ("Is it alive?\nDoes it fly", Fault.SEVERAL),
        ("[clock] [dog]", Fault.SEVERAL),
        ("Is it alive? [clock]", Fault.SEVERAL),
        ("1. Is it alive?\n2. Is it a dog?", Fault.SEVERAL),
        ("hello there", Fault.NO_QUESTION),
        ("I think it is alive.", Fault.NO_QUESTION),
        ("I guess so.", Fault.NO_QUESTION),
        ("Read the next question.", Fault.NO_QUESTION),
        ("[ ]", Fault.NO_QUESTION),
    ],
)
def test_invalid_actions(text: str, fault: Fault) -> None:
    assert READER.parse(text) is fault


@pytest.mark.parametrize(
    "text",
    [
        "Is it alive?",
        "is it alive",
        "Okay! Let me see. Is it alive??",
        "Question 3: Is it alive?",
        "2) Is it alive?",
        "**Is it alive?**",
        "[Is it alive?]",
        '"Is it alive?"',
        "My next question is: is it alive?",
        "My next question is is it alive?",
        "Question 3 is it alive?",
        "Yes. Is it alive?",
    ],
)
def test_one_question_is_found_among_other_words(text: str) -> None:
    assert READER.parse(text) == Question(text="is it alive")


def test_canonical_names() -> None:
    assert READER.canonical("Fridge") == "refrigerator"
    assert READER.canonical("a T-Shirt") == "shirt"
    assert READER.canonical("  Test Word ") == "test word"
    assert READER.canonical("?") == ""


@given(st.text(max_size=80), st.sampled_from(["", "testword", "clock"]))
def test_any_text_is_one_move(text: str, solution: str) -> None:
    move = READER.parse(text, solution)
    assert isinstance(move, Question | Guess | Fault)
    if isinstance(move, Guess):
        assert move.name


@given(st.text(alphabet="abcdefgh ", min_size=1, max_size=8), st.sampled_from(sorted(OBJECTS)), st.booleans())
def test_more_words_around_a_name_never_name_it(extra: str, name: str, before: bool) -> None:
    words = f"{extra}{name}" if before else f"{name}{extra}"
    if READER.canonical(words) != name:  # articles, plurals and blanks aside
        for form in ("Is it a {}?", "[{}]", "My final guess is: a {}"):
            assert READER.parse(form.format(words)) != Guess(name=name)


@given(st.text(max_size=60))
@example("'#")
def test_normalising_is_done_once(text: str) -> None:
    once = normalize(text)
    assert core(core(once)) == core(once)
