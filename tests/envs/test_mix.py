"""``mix`` keeps every source's share at every place, loses no row, and names what is wrong with a source."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from mixed_envs import Guess, LookUp, SayItTwice, SayTheColor

from agentsgym import ConfigError, MultistepEnv, make, mix
from agentsgym.envs.datasets.mix import schedule
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv

TASKS = [{"word": "one"}, {"word": "two"}, {"word": "one", "seed": 3}]
SOURCES: dict[str, Any] = {
    "color": SayTheColor,
    "twice": (SayItTwice, {"max_steps_per_episode": 4}),
    "guess": (Guess, {"highest": 2}, [{"seed": seed} for seed in range(5)]),
    "tool": (LookUp, None, TASKS),
}


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8))
def test_every_beginning_holds_each_share_to_less_than_one(weights: list[int]) -> None:
    counts, total = [0] * len(weights), sum(weights)
    for place, chosen in enumerate(schedule(weights, 200), 1):
        counts[chosen] += 1
        assert all(abs(weight * place - count * total) < total for weight, count in zip(weights, counts, strict=True))


def test_any_stretch_of_rows_holds_the_weights() -> None:
    labels = mix(SOURCES, weights={"color": 4, "twice": 3, "guess": 2, "tool": 1}, size=200)["environment"]
    for start in range(150):
        window = list(labels)[start : start + 50]
        for name, share in (("color", 0.4), ("twice", 0.3), ("guess", 0.2), ("tool", 0.1)):
            assert abs(window.count(name) - 50 * share) < 2


def test_rows_hold_their_own_environment_and_task_alone() -> None:
    dataset = mix(SOURCES, size=40)
    assert set(dataset.column_names) == {"env_class_path", "env_config", "task_data", "environment"}
    by_name = {row["environment"]: row for row in dataset}
    assert by_name["tool"]["env_config"] == {}
    assert by_name["guess"]["env_config"] == {"highest": 2}
    assert set(by_name["color"]["task_data"]) == {"color"}
    for name, env_class in (("color", SayTheColor), ("twice", SayItTwice), ("guess", Guess), ("tool", LookUp)):
        assert type(make(by_name[name])) is env_class


def test_each_row_of_a_source_comes_once_before_any_comes_again() -> None:
    seeds = [row["task_data"]["seed"] for row in mix(SOURCES, size=80) if row["environment"] == "guess"]
    assert len(seeds) == 20
    passes = [seeds[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_equal_seeds_give_equal_rows_and_others_give_others() -> None:
    rows = [list(mix(SOURCES, size=60, seed=seed)) for seed in (1, 1, 2)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


def test_without_a_size_there_are_as_many_rows_as_the_sources_have() -> None:
    assert len(mix(SOURCES)) == 2 + 2 + 5 + 3
    assert len(mix({"one": (SayTheColor, None, {"size": 1})})) == 1


def test_mixtures_are_sources_themselves_and_other_columns_are_kept() -> None:
    inner = mix({"color": SayTheColor, "guess": SOURCES["guess"]})
    rows = [{**row, "level": index} for index, row in enumerate(mix({"tool": SOURCES["tool"]}))]
    outer = mix({"words": inner, "tools": rows, "env": SayItTwice()})
    assert set(outer["environment"]) == {"words/color", "words/guess", "tools/tool", "env"}
    assert {row["level"] for row in outer if row["environment"] == "tools/tool"} == {0, 1, 2}
    assert {row["level"] for row in outer if row["environment"] == "env"} == {None}


def test_an_environment_of_json_values_alone_is_a_source() -> None:
    config = {"max_steps_per_episode": 3}
    for env in (SayIt(None, config, how=None), SayIt(env_config=config), SayAnything(None, config)):
        assert {row["env_config"]["max_steps_per_episode"] for row in mix({"a": env})} == {3}


def test_a_class_that_nobody_registered_is_registered() -> None:
    class Fresh(SayTheColor):
        pass

    dataset = mix({"fresh": (Fresh, {}, [{"color": "red"}])})
    assert type(make(dataset[0])) is Fresh


class WithoutTasks(SayTheColor):
    """It has none of its own."""

    get_train_dataset = MultistepEnv.get_train_dataset


class SayIt(SayTheColor):
    """Its constructor takes more than a row states."""

    def __init__(self, tokenizer: Any = None, env_config: Any = None, how: Any = None) -> None:
        super().__init__(tokenizer, env_config)
        self.how = how


class SayAnything(SayIt):
    """It hands everything on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


ROW = {"env_class_path": "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv", "task_data": {"solution": "cat"}}


@pytest.mark.parametrize(
    ("sources", "options", "text"),
    [
        ({}, {}, "sources must be a non-empty dict of sources by name"),
        ([SayTheColor], {}, "sources must be a non-empty dict of sources by name"),
        ({"a/b": SayTheColor}, {}, "a non-empty str without '/'"),
        ({"a": SayTheColor}, {"weights": {"b": 1}}, "weights has the key 'b', which is not a source"),
        ({"a": SayTheColor, "b": Guess}, {"weights": {"a": 1}}, "weights has no weight for the source 'b'"),
        ({"a": SayTheColor}, {"weights": {"a": 0}}, "must be a number above 0"),
        ({"a": SayTheColor}, {"weights": {"a": float("nan")}}, "must be a number above 0"),
        ({"a": SayTheColor}, {"weights": [1]}, "weights must be a dict"),
        ({"a": SayTheColor}, {"size": 0}, "size must be a positive int"),
        ({"a": SayTheColor}, {"seed": 0.5}, "seed must be an int"),
        ({"a": SayTheColor}, {"split": "test"}, "split must be 'train' or 'eval'"),
        ({"a": []}, {}, "the source 'a' must contain at least one row"),
        ({"a": "rows"}, {}, "the source 'a' is invalid: a source must be dataset rows"),
        ({"a": 3}, {}, "the source 'a' is invalid: a source must be dataset rows"),
        ({"a": (3, {})}, {}, "the source 'a' is invalid: a source must be dataset rows"),
        ({"a": (Guess, {}, "tasks")}, {}, "must be a list of task_data"),
        ({"a": (Guess, {"highest": print}, [{}])}, {}, r"env_config\['highest'\] must be a JSON value"),
        ({"a": WithoutTasks}, {}, "the source 'a' has no tasks"),
        ({"a": (Guess, {"higest": 3}, [{}])}, {}, "the source 'a' is invalid: .*did you mean 'highest'"),
        (
            {"a": ReasoningEvalsEnv(None, {"grader": max})},
            {},
            r"'a' is invalid: the environment was built with env_config\['grader'\], which",
        ),
        (
            {"a": SayIt(None, None, "red")},
            {},
            "'a' is invalid: the environment was built with how, which cannot be stored in a dataset row",
        ),
        (
            {"a": SayIt(None, {}, how=repr)},
            {},
            "'a' is invalid: the environment was built with how, which cannot be stored in a dataset row",
        ),
        (
            {"a": SayAnything(None, {}, how=repr)},
            {},
            "'a' is invalid: the environment was built with how, which cannot be stored in a dataset row",
        ),
        ({"a": [{"task_data": {}}]}, {}, "row 0 has no 'env_class_path'"),
        ({"a": [{**ROW, "env_class_path": "TwentyQuestion"}]}, {}, "is not registered"),
        ({"a": [{**ROW, "task_data": 3}]}, {}, "must be a dict, got 3"),
        ({"a": [{**ROW, "env_config": 3}]}, {}, "must have a dict or None as its 'env_config'"),
        ({"a": [{**ROW, "task_data": {"solution": {1}}}]}, {}, "row 0 contains a value that JSON cannot represent"),
        (
            {"a": IterableDataset.from_generator(lambda: iter([ROW]))},
            {},
            "the source 'a' is invalid: a source must be dataset rows",
        ),
    ],
)
def test_what_cannot_be_mixed_is_named(sources: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        mix(sources, **options)


def test_datasets_with_null_filled_columns_are_read_as_they_were_meant() -> None:
    filled = Dataset.from_list([{**ROW, "env_config": {"max_steps_per_episode": 3, "highest": None}}])
    assert make(mix({"a": filled})[0]).env_config["max_steps_per_episode"] == 3
