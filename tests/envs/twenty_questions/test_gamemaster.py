from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.TwentyQuestions.gamemaster import (
    NO,
    REPLIES,
    SOMETIMES,
    UNKNOWN,
    YES,
    Gamemaster,
    load_language,
    paraphrases,
)
from agentsgym.envs.TwentyQuestions.knowledge import load_knowledge

KNOWLEDGE = load_knowledge()
LANGUAGE = load_language()
GAMEMASTER = Gamemaster(KNOWLEDGE, LANGUAGE, KNOWLEDGE.properties)
REPLY = {"yes": YES, "no": NO, "sometimes": SOMETIMES}
OPPOSITE = {YES: NO, NO: YES, SOMETIMES: SOMETIMES}


@pytest.mark.parametrize("key", KNOWLEDGE.properties)
def test_every_paraphrase_is_answered_with_the_fact_for_every_object(key: str) -> None:
    questions = random.Random(key).sample(list(paraphrases(KNOWLEDGE.properties[key])), 60)
    for (question, opposite), name in itertools.product(questions, KNOWLEDGE.objects):
        fact = REPLY[KNOWLEDGE.objects[name].values[key]]
        assert GAMEMASTER(name, question) == (OPPOSITE[fact] if opposite else fact), (question, name)


@pytest.mark.parametrize("key", KNOWLEDGE.properties)
def test_the_own_question_is_understood(key: str) -> None:
    question = KNOWLEDGE.properties[key].question
    for name, known in KNOWLEDGE.objects.items():
        assert GAMEMASTER(name, question) == REPLY[known.values[key]]


def test_no_paraphrase_belongs_to_two_properties() -> None:
    for entry in KNOWLEDGE.properties.values():
        for question, opposite in itertools.islice(paraphrases(entry), 0, None, 97):
            meanings = {(meaning.key, meaning.opposite) for meaning in LANGUAGE.meanings(question)}
            assert meanings == {(entry.key, opposite)}, question


@pytest.mark.parametrize(
    ("question", "key"),
    [
        ("Is it something alive?", "alive"),
        ("would you call it a living thing", "alive"),
        ("IS THE OBJECT YOU ARE THINKING OF ALIVE?!", "alive"),
        ("Does it live in water?", "water"),
        ("Do you think it lives in water?", "water"),
        ("Is it something that you can eat?", "edible"),
        ("Is it something people usually wear?", "wearable"),
        ("Could you tell me whether it has wheels?", "wheels"),
        ("Is your object a kind of animal?", "animal"),
        ("Is it larger than a human?", "bigger"),
        ("Is it an item of furniture?", "furniture"),
        ("Is it used for writing?", "write"),
        ("Is it \u201cman\u2011made\u201d?", "man_made"),
    ],
)
def test_natural_ways_to_ask(question: str, key: str) -> None:
    meaning = LANGUAGE.understand(question)
    assert meaning is not None
    assert (meaning.key, meaning.opposite) == (key, False)


@pytest.mark.parametrize(
    "question",
    [
        "Is it not alive?",
        "Isn't it alive?",
        "Is it never alive?",
        "Is it alive or dead?",
        "Is it alive and bigger than a person?",
        "Is it a living thing that lives in water?",
        "Is it bigger than a breadbox?",
        "Is it bigger than a car?",
        "Is it always soft?",
        "Is it an animal with fur?",
        "Does it have four legs?",
        "Does it have no wheels?",
        "Can it fly or swim?",
        "Can't it fly?",
        "Do you never wear it?",
        "Can you eat it raw?",
        "Is it made of metal and wood?",
        "Is part of it made of metal?",
        "Is it almost round?",
        "Was it alive?",
        "What color is it?",
        "Is it somewhat sharp?",
        "Is it a",
        "",
    ],
)
def test_what_is_not_exactly_a_property_is_not_answered(question: str) -> None:
    assert {GAMEMASTER(name, question) for name in KNOWLEDGE.objects} == {UNKNOWN}


def test_opposites_are_answered_right() -> None:
    assert GAMEMASTER("dog", "Is it inanimate?") == NO
    assert GAMEMASTER("hammer", "Is it an inanimate object?") == YES
    assert GAMEMASTER("apple", "Is it inanimate?") == SOMETIMES
    assert GAMEMASTER("ring", "Is it smaller than a person?") == YES


def test_unknown_objects_and_properties_outside_the_game_are_not_answered() -> None:
    few = Gamemaster(KNOWLEDGE, LANGUAGE, ["animal"])
    assert GAMEMASTER("testword", "Is it alive?") == UNKNOWN
    assert few("dog", "Is it alive?") == UNKNOWN
    assert few("dog", "Is it an animal?") == YES


WORDS = sorted({word for entry in KNOWLEDGE.properties.values() for word in entry.question.lower().strip("?").split()})


@given(st.lists(st.sampled_from([*WORDS, "not", "and", "or", "never", "no"]), max_size=8), st.sampled_from(REPLIES))
def test_word_salad_is_answered_only_if_it_is_a_property_said_right(words: list[str], reply: str) -> None:
    question = " ".join(words)
    meanings = LANGUAGE.meanings(question)
    assert len(meanings) <= 1
    if meanings:
        assert not {"not", "never", "and", "or", "no"} & set(words)
    assert GAMEMASTER("dog", question) in REPLIES


@given(st.text(max_size=60))
def test_any_text_gets_one_of_the_replies(text: str) -> None:
    assert GAMEMASTER("dog", text) in REPLIES
