from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.TwentyQuestions.gamemaster import NO, REPLIES, SOMETIMES, UNKNOWN, YES, Gamemaster
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge
from agentsgym.envs.TwentyQuestions.language import load_language

KNOWLEDGE = load_knowledge()
LANGUAGE = load_language()
GAMEMASTER = Gamemaster(KNOWLEDGE.properties)
REPLY = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
OPPOSITE = {YES: NO, NO: YES, SOMETIMES: SOMETIMES}


@pytest.mark.parametrize("key", KNOWLEDGE.properties)
def test_the_own_question_is_understood(key: str) -> None:
    question = KNOWLEDGE.properties[key].question
    for name, known in KNOWLEDGE.objects.items():
        assert GAMEMASTER(name, question) == REPLY[known.values[key]]


def test_opposites_are_answered_right() -> None:
    assert GAMEMASTER("dog", "Is it inanimate?") == NO
    assert GAMEMASTER("hammer", "Is it an inanimate object?") == YES
    assert GAMEMASTER("leaf", "Is it inanimate?") == SOMETIMES
    assert GAMEMASTER("ring", "Is it smaller than a person?") == YES


def test_unknown_objects_and_properties_outside_the_game_are_not_answered() -> None:
    few = Gamemaster(["animal"])
    assert GAMEMASTER("testword", "Is it alive?") == UNKNOWN
    assert few("dog", "Is it alive?") == UNKNOWN
    assert few("dog", "Is it an animal?") == YES


def test_sizes_are_compared_if_they_differ_clearly() -> None:
    assert GAMEMASTER("car", "Is it bigger than a dog?") == YES
    assert GAMEMASTER("ring", "Is it bigger than a car?") == NO
    assert GAMEMASTER("ring", "Is it smaller than a horse?") == YES
    assert GAMEMASTER("horse", "Is it larger than a cow?") == UNKNOWN
    assert GAMEMASTER("horse", "Is it bigger than a horse?") == NO
    assert GAMEMASTER("horse", "Is it bigger than a zeppelin?") == UNKNOWN
    few = Gamemaster(["bigger"])
    assert few("car", "Is it bigger than a dog?") == UNKNOWN


@pytest.mark.parametrize(
    ("question", "reply"),
    [
        ("Does it start with d?", YES),
        ("Does its name begin with the letter c?", NO),
        ("Does it start with u?", NO),
        ("Is the first letter a vowel?", NO),
        ("Is the first letter a consonant?", YES),
        ("Does its name have more than five letters?", NO),
        ("Does its name have fewer than 4 letters?", YES),
        ("Does it have 3 letters?", YES),
        ("Does it contain the letter g?", YES),
        ("Does its name have the letter c in it?", NO),
        ("Is there an o in its name?", YES),
        ("Is it one word?", YES),
        ("Is it a single word?", YES),
    ],
)
def test_questions_about_the_name(question: str, reply: str) -> None:
    assert GAMEMASTER("dog", question) == reply


@given(st.text(max_size=60))
def test_any_text_gets_one_of_the_replies(text: str) -> None:
    assert GAMEMASTER("dog", text) in REPLIES
