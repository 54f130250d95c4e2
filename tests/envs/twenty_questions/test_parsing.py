from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentsgym.envs.TwentyQuestions.gamemaster import load_reader
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.envs.TwentyQuestions.parsing import Fault, Guess, Question, core, normalize

READER = load_reader()
OBJECTS = load_knowledge().objects
OTHER_NAMES = load_knowledge().other_names
ADJECTIVES = {"auto", "iron", "jersey", "marble", "mobile", "orange", "plaster", "remote", "semi", "stone"}
ADJECTIVES |= {"cedar", "home", "jet", "maple", "oak", "pine", "well"}
NAMES = [(name, known.name) for known in OBJECTS.values() for name in known.names if name not in ADJECTIVES]
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
        "Is it a kind of dog?",  # unless the secret is a dog
        "Is it a toy for a dog?",
        "Can it fly?",
        "It's not a clock, is it?",
        "Do you have a clock?",
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


USUAL_FORMS = r"""
    Isn't it {x}? | It's {x}, isn't it? | it's {x} right? | So it's {x}? | its {x}, right? | Is that {x}?
    Is this {x}? | Are you {x}? | Would it be {x}? | Could this possibly be {x}? | Is it by chance {x}
    Is it, perhaps, {x}? | is it {x} please | I bet it's {x} | I'm pretty sure it's {x}! | I am thinking it is {x}
    I'm going with {x}. | I would say {x} | Let me guess: {x} | It's got to be {x} | gotta be {x} | It must be {x}
    What about {x}? | {x}, final answer | {x}. That's my final answer. | Is it {x}? Yes or no?
    Does the word happen to be {x}? | My guess for the secret object is {x} | \boxed{{{x}}}
    $\boxed{{\text{{{x}}}}}$ | <answer>{x}</answer> | <guess> {x} </guess>
    Let me think. <final_answer>{x}</final_answer> | The final answer is $\boxed{{{x}}}$. | It's {x}. Am I right?
    Let's go with {x} | Surely it's {x}? | Would you say it's {x}? | I'm 99% sure it's {x} | Aha, it's {x}!
"""


@pytest.mark.parametrize("form", re.split(r"\s*[|\n]\s*", USUAL_FORMS.strip()))
def test_all_usual_forms_are_guesses(form: str) -> None:
    for name in ("clock", "ice cream", "mobile phone", "rat"):
        for text in (form.format(x=f"an {name}" if name[0] == "i" else f"a {name}"), form.format(x=name)):
            assert READER.parse(text) == Guess(name=READER.canonical(name)), text


@pytest.mark.parametrize(
    "text", ["Is it some kind of clock?", "Is it a type of clock?", "it's a sort of clock, right?"]
)
def test_some_kind_of_an_object_is_a_guess_only_of_the_secret(text: str) -> None:
    assert READER.parse(text, "clock") == Guess(name="clock")
    assert isinstance(READER.parse(text, "hourglass"), Question)  # "No." might be false


def test_the_name_of_a_broader_object_is_no_wrong_guess() -> None:
    assert READER.parse("Is it a ball?", "bowling ball") == Question(text="is it a ball")
    assert READER.parse("Is it a ball?", "ball") == READER.parse("[ball]", "bowling ball") == Guess(name="ball")


@pytest.mark.parametrize(
    "text", ["Is it a clock or a watch?", "Is it a clock? If not, is it a watch?", "[clock] [rat]"]
)
def test_two_guesses_in_one_turn_are_refused(text: str) -> None:
    assert READER.parse(text, "clock") is Fault.SEVERAL


@pytest.mark.parametrize("name", sorted(ADJECTIVES))
def test_an_adjective_or_a_material_is_no_guess_without_an_article(name: str) -> None:
    target = READER.canonical(name)
    assert isinstance(READER.parse(f"Is it {name}?", target), Question)
    assert READER.parse(f"I think it's {name}.", target) is Fault.NO_QUESTION
    assert READER.parse(f"Is it the {name}?") == READER.parse(f"[{name}]") == Guess(name=target)


def test_a_material_that_is_an_object_is_both() -> None:
    assert READER.parse("Is it paper?", "envelope") == Question(text="is it paper", name="paper")
    assert READER.parse("Is it paper?", "paper") == Guess(name="paper")


@pytest.mark.parametrize(
    ("text", "name"),
    [("Is it a refirgerator?", "refrigerator"), ("[gutiar]", "guitar"), ("Is it an ice craem?", "ice cream")],
)
def test_two_exchanged_letters_are_corrected(text: str, name: str) -> None:
    assert READER.parse(text) == Guess(name=name)


@pytest.mark.parametrize("text", ["Is it a clok?", "Is it a cokc?", "Is it a bannana?", "Is it barekd?"])
def test_other_misspellings_are_not_corrected(text: str) -> None:
    assert isinstance(READER.parse(text), Question)


@pytest.mark.parametrize(
    "name", ["rat", "wasp", "moth", "hot dog", "donut", "guinea pig", "pipe", "sleeping bag", "zeppelin"]
)
def test_other_common_things_can_be_guessed(name: str) -> None:
    for text in (f"Is it a {name}?", f"[{name}]", f"My final guess is: a {name}", f"Are they {name}s?"):
        assert READER.parse(text) == Guess(name=name), text


@pytest.mark.parametrize(
    "name", ["machine", "mineral", "dairy product", "gizmo", "poodle", "kitchen utensil", "landform"]
)
def test_any_other_noun_is_a_question_unless_it_is_marked_as_a_guess_or_the_secret(name: str) -> None:
    assert READER.parse(f"Is it a {name}?", "gold") == Question(text=f"is it a {name}")
    assert READER.parse(f"I think it's a {name}.") is Fault.NO_QUESTION
    for text in (f"[{name}]", f"My guess is a {name}", f"<answer>{name}</answer>", f"\\boxed{{{name}}}"):
        assert READER.parse(text) == Guess(name=name), text
    assert READER.parse(f"Is it a {name}?", name) == Guess(name=name)


def test_the_other_names_are_names_of_nothing_else() -> None:
    assert len(OTHER_NAMES) >= 1500
    assert {normalize(name) for name in OTHER_NAMES} == OTHER_NAMES
    assert [name for name in OTHER_NAMES if READER.canonical(name) in OBJECTS] == []


# Each is true of some secret
KINDS = """
    machine mineral rodent toy tool planet device insect mammal bird fish fruit vegetable plant flower drink food
    meal snack dessert candy appliance utensil container bag box brush vehicle weapon instrument building
    structure furniture seat clothing garment shoe jewelry accessory metal gem gemstone material fabric liquid
    spice herb nut berry grain predator pet animal creature reptile amphibian crustacean mollusk shellfish
    arachnid beetle cat dog ape pastry bread pasta meat juice sauce condiment beverage plaything game ball wheel
    card light lamp bulb dish glass knife gun boat shell flask noodle melon van truck tram robot satellite stone
    pebble gear hunter staple
"""


def test_no_kind_of_an_object_is_denied() -> None:
    assert OTHER_NAMES.isdisjoint(KINDS.split())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("orca", "whale"), ("letterbox", "mailbox"), ("digital clock", "clock"), ("ferry", "boat")),
        *(("baguette", "bread"), ("hacksaw", "saw"), ("minibus", "bus"), ("dictionary", "book"), ("cutlass", "sword")),
    ],
)
def test_narrower_kinds_are_names_too(name: str, target: str) -> None:
    assert READER.parse(f"Is it a {name}?", target) == Guess(name=target)


@pytest.mark.parametrize("text", ["Is it a fish?", "Is it fish?", "Could it be a fish?", "[Is it a fish?]"])
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
        ("metal", Fault.NO_QUESTION),
        ("metal?", Fault.NO_QUESTION),
        ("Alive", Fault.NO_QUESTION),
        ("Really?", Fault.NO_QUESTION),
        ("Let's play!", Fault.NO_QUESTION),
        ("Let's play", Fault.NO_QUESTION),
        ("Play with it!", Fault.NO_QUESTION),
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
        "Is it alive? Yes or no?",
    ],
)
def test_one_question_is_found_among_other_words(text: str) -> None:
    assert READER.parse(text) == Question(text="is it alive")


@pytest.mark.parametrize("text", ["isn't it alive", "doesn't it have legs", "bigger than a shoebox?", "made of metal"])
def test_a_question_needs_neither_a_question_mark_nor_a_verb(text: str) -> None:
    assert READER.parse(text) == Question(text=text.removesuffix("?"))


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
