"""How goals are read and counted, commands found in answers, and expressions of a grammar admitted."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.ALFWorld.engine import Fact, parse_expression, parse_goal
from agentsgym.envs.ALFWorld.env import extract_command
from agentsgym.envs.ALFWorld.patches import copy_loaded_part, evaluate
from agentsgym.errors import EnvError

OBJECTS = {"apple1": "object", "apple2": "object", "mug": "object", "fridge": "receptacle", "shelf": "receptacle"}
STATIC: set[Fact] = {
    ("objecttype", "apple1", "appletype"),
    ("objecttype", "apple2", "appletype"),
    ("objecttype", "mug", "mugtype"),
    ("receptacletype", "fridge", "fridgetype"),
    ("receptacletype", "shelf", "shelftype"),
}
CHANGING = {"inreceptacle", "ishot", "opened"}
HOT = "(exists (?r - receptacle) (exists (?o - object) (and (isHot ?o) (objectType ?o AppleType) \
(receptacleType ?r FridgeType) (inReceptacle ?o ?r))))"
TWO = "(exists (?r - receptacle ?a ?b - object) (and (receptacleType ?r ShelfType) (objectType ?a AppleType) \
(objectType ?b AppleType) (not (= ?a ?b)) (inReceptacle ?a ?r) (inReceptacle ?b ?r)))"
PLACES = [("inreceptacle", thing, place) for thing in ("apple1", "apple2", "mug") for place in ("fridge", "shelf")]
FACTS: list[Fact] = [*PLACES, ("ishot", "apple1"), ("ishot", "apple2"), ("opened", "fridge")]


def count(goal: str, facts: set[Fact]) -> tuple[int, int]:
    problem = f"(define (problem p) (:init) ; a comment (\n (:goal {goal}))"
    return parse_goal(problem, OBJECTS, STATIC, CHANGING).met(facts)


def test_the_best_object_counts() -> None:
    assert count(HOT, set()) == (0, 2)
    assert count(HOT, {("ishot", "mug"), ("inreceptacle", "mug", "fridge")}) == (0, 2)
    assert count(HOT, {("ishot", "apple1"), ("inreceptacle", "apple2", "fridge")}) == (1, 2)
    assert count(HOT, {("ishot", "apple2"), ("inreceptacle", "apple2", "fridge")}) == (2, 2)
    assert count(TWO, {("inreceptacle", "apple1", "shelf")}) == (1, 2)
    assert count(TWO, {("inreceptacle", "apple1", "shelf"), ("inreceptacle", "apple2", "shelf")}) == (2, 2)


def test_parts_that_share_no_object_are_added() -> None:
    goal = f"(and {HOT} (not (opened fridge)))"
    assert count(goal, set()) == (1, 3)
    assert count(goal, {("opened", "fridge"), ("ishot", "apple1")}) == (1, 3)


def test_all_and_either() -> None:
    everything = "(forall (?o - object) (or (objectType ?o MugType) (inReceptacle ?o shelf)))"
    assert count(everything, set()) == (0, 2)
    assert count(everything, {("inreceptacle", "apple2", "shelf")}) == (1, 2)
    assert count("(or (opened shelf) (and (opened fridge) (isHot mug)))", {("opened", "fridge")}) == (1, 2)


@given(st.sets(st.sampled_from(FACTS)))
def test_a_goal_holds_exactly_when_all_its_conditions_do(facts: set[Fact]) -> None:
    apples = ("apple1", "apple2")
    is_hot = any(("ishot", one) in facts and ("inreceptacle", one, "fridge") in facts for one in apples)
    are_two = all(("inreceptacle", one, "shelf") in facts for one in apples)
    for goal, holds in ((HOT, is_hot), (TWO, are_two)):
        met, total = count(goal, facts)
        assert 0 <= met <= total == 2
        assert (met == total) == holds
        negated, of = count(f"(not {goal})", facts)
        assert (negated == of) == (not holds)


def test_a_goal_that_cannot_be_counted_is_reported() -> None:
    for goal, sentence in (
        ("(objectType mug AppleType)", "cannot be satisfied"),
        ("(exists (?k - knife) (isHot ?k))", "cannot be satisfied"),
        ("(imply (opened fridge) (isHot mug))", "contains 'imply'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            count(goal, set())
    with pytest.raises(ValueError, match="no \\(:goal"):
        parse_goal("(define (problem p))", OBJECTS, STATIC, CHANGING)
    for text in ("", "(define (problem)", ")("):
        with pytest.raises(ValueError, match="parentheses"):
            parse_expression(text)


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("go to fridge 1", "go to fridge 1"),
        ("  Take Apple 1  from fridge 1. ", "take apple 1 from fridge 1"),
        ("I should look.\n> look", "look"),
        ("Now. <action>close fridge 1</action> Done.", "close fridge 1"),
        ("<action>look</action> or <action> inventory </action>", "inventory"),
        ("<action>look", "look"),
        ("`use desklamp 1`", "use desklamp 1"),
        ("2. look", "look"),
        ("", ""),
        ("```\ngo to desk 1\n```", "go to desk 1"),
        ("**go to desk 1**", "go to desk 1"),
        ("x" * 500, ""),
    ],
)
def test_the_command_in_an_answer(message: str, command: str) -> None:
    assert extract_command(message) == command


def test_expressions_name_and_join_and_do_nothing_else() -> None:
    thing = SimpleNamespace(name="mug 1", id="Mug", indefinite="a")
    for expression, value in (("o.indefinite + ' ' + o.name", "a mug 1"), (" o.name or o.id", "mug 1"), ("o", thing)):
        assert evaluate(expression, {"o": thing}) == value
    for expression in (
        "open('x')",
        "o.__class__",
        "[x for x in o]",
        "o[0]",
        "(lambda: o)()",
        "o if o else o",
        "o.",
        "",
    ):
        with pytest.raises(EnvError, match="expression"):
            evaluate(expression, {"o": thing})


def test_a_file_that_is_no_library_is_copied_whole(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF", b"no library" * 100):
        source = tmp_path / f"source {len(content)}"
        source.write_bytes(content)
        copy_loaded_part(str(source), str(tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == content


def test_every_choice_of_several_variables_is_tried() -> None:
    for one, other in itertools.permutations(["apple1", "apple2"]):
        assert count(TWO.replace("?a", "?x"), {("inreceptacle", one, "shelf")}) == (1, 2)
        assert count("(exists (?x ?y - object) (and (isHot ?x) (inReceptacle ?y shelf)))", {("ishot", other)}) == (1, 2)
