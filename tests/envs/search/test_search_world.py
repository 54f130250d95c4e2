"""The generated world: its questions follow from its passages, and nothing else is answered there."""

from __future__ import annotations

import pytest

from agentsgym.envs.Search.world import FACTS, QUESTIONS, World, path_of_question, paths_of
from agentsgym.errors import ConfigError


def test_a_seed_makes_the_same_world_and_another_one_another() -> None:
    assert World(seed=5).passages == World(seed=5).passages
    assert World(seed=5).passages != World(seed=6).passages


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_follows_from_the_passages_alone(seed: int) -> None:
    world = World(seed=seed, num_people=30)
    text_of = {one["title"]: one["text"] for one in world.passages}
    for person in world.people:
        for path in QUESTIONS:
            task = world.task(person, path)
            entity = person
            for title, relation in zip(task["evidence"], path, strict=True):
                assert entity == title
                [entity] = FACTS[relation].findall(text_of[title])
            assert entity == task["answers"][0]
            assert path_of_question(task["question"]) == (person, path)


def test_no_two_names_share_a_word() -> None:
    world = World(num_people=3000, num_firms=1)
    words = [word for one in world.people for word in one.split()]
    assert len(set(words)) == 6000


@pytest.mark.parametrize("text", ["", "Who is it?", "Which firm does x work for?", "Which firm does A B C work for?"])
def test_other_questions_are_not_understood(text: str) -> None:
    assert path_of_question(text) is None


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_towns must be an int from 1"):
        World(num_towns=0)
    with pytest.raises(ConfigError, match=r"hops must be a subset of \[1, 2, 3, 4\], got \[5\]"):
        paths_of([5])
    assert {len(path) for path in paths_of([2])} == {2}
