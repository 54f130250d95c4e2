from __future__ import annotations

from typing import Any

import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.Gymnasium.actions import action_table, is_actions
from agentsgym.errors import ConfigError, EnvError

LAKE = action_table(None, Discrete(4), ("left", "down", "right", "up"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("left", 0),
        (" RIGHT. ", 2),
        ("I go [up].", 3),
        ("Not [up]! Better [down]", 1),
        ("[ up ]", 3),
        ("[jump], so left", 0),
        ("up and up", 3),
    ],
)
def test_an_action_is_read_wherever_it_is_named(text: str, number: int) -> None:
    assert LAKE.parse(text) == number


@pytest.mark.parametrize("text", ["", "left or right", "leftover", "2", "[jump]"])
def test_what_names_no_action_or_several_is_none(text: str) -> None:
    assert LAKE.parse(text) is None


@given(st.text(max_size=40))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert LAKE.parse(text) in {None, 0, 1, 2, 3}


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6).filter(is_actions))
def test_every_name_in_brackets_is_read_as_itself(names: list[str]) -> None:
    table = action_table(names, Discrete(len(names), start=5), None)
    assert [table.parse(f"so [{name}]") for name in names] == [5 + index for index in range(len(names))]


def test_a_list_names_the_first_actions_and_a_dict_any() -> None:
    assert action_table(["stay"], Discrete(3), None).by_name == {"stay": 0}
    assert action_table({"fire": 2, "shoot": 2}, Discrete(3), None).values == (2,)
    assert action_table(None, Discrete(2, start=-1), None).by_name == {"-1": -1, "0": 0}


def test_a_space_that_starts_below_zero_may_be_named() -> None:
    given = {"back": -1, "stay": 0}
    assert is_actions(given)
    assert action_table(given, Discrete(3, start=-1), None).parse("[back]") == -1


@pytest.mark.parametrize(
    ("given", "space", "sentence"),
    [
        ({"fly": 4}, Discrete(4), r"must name actions from 0 to 3, each name once, got \{'fly': 4\}"),
        (["a", "b", "c"], Discrete(2), "must name actions from 0 to 1"),
        (None, Discrete(1000), "the environment has 1000, more than 64"),
        (None, MultiDiscrete([2, 2]), r"supports only Discrete action spaces, but this one is MultiDiscrete"),
        (None, Box(0, 1, (2,)), "supports only Discrete action spaces"),
        ({"Up": 0, "up": 1}, Discrete(2), "must contain names that differ in more than case and spacing"),
    ],
)
def test_a_table_that_cannot_be_made_gives_the_reason(given: Any, space: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        action_table(given, space, None)


def test_a_parser_reads_in_the_place_of_the_table() -> None:
    table = action_table(lambda text: len(text) if text else None, Discrete(4), None)
    assert table.parse("ab") == 2
    assert table.parse("") is None
    with pytest.raises(EnvError, match=r"must return one of \[0, 1, 2, 3\] or None, got 5"):
        table.parse("hello")


@pytest.mark.parametrize("value", [{}, [], {"a": 1.0}, {"a": True}, {1: 1}, ["a", "A"], ["[a]"], [""], 7, "left"])
def test_what_is_no_table_is_refused(value: Any) -> None:
    assert not is_actions(value)
