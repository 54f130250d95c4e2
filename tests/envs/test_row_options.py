"""What every environment's datasets have in common: options, rows that name their class, the tasks of commands."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from guess_game import GuessEnv
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.environments import class_path
from agentsgym.envs.datasets.options import shuffled, task_seed, tasks_of
from agentsgym.envs.Gymnasium import GymnasiumEnv
from agentsgym.envs.OpenEnv import OpenEnvEnv
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
from agentsgym.envs.ScienceWorld import ScienceWorldEnv
from agentsgym.envs.Search import SearchEnv
from agentsgym.envs.Terminal import TerminalEnv
from agentsgym.envs.TextArena import TextArenaEnv
from agentsgym.envs.TextWorld import TextWorldEnv
from agentsgym.envs.Tools import ToolEnv
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError

DATA: dict[str, Any] = {
    "data": [{"question": f"What is {n}?", "answer": str(n), "answers": [str(n)]} for n in range(4)]
}
# class: what its datasets need
NEEDED: dict[type[MultistepEnv], tuple[dict[str, Any], dict[str, Any]]] = {
    GymnasiumEnv: ({}, {}),
    OpenEnvEnv: ({}, {}),
    PriceListEnv: ({}, {}),
    ReasoningEvalsEnv: ({}, DATA),
    ScienceWorldEnv: ({}, {"tasks": ["boil"]}),
    SearchEnv: ({"corpus": [{"text": "One follows zero."}]}, DATA),
    TerminalEnv: ({}, {}),
    TextArenaEnv: ({"game": "TicTacToe-v0"}, {}),
    TextWorldEnv: ({"kind": "cooking"}, {}),
    ToolEnv: ({}, DATA),
    TwentyQuestionsEnv: ({}, {}),
}
OF_EACH = pytest.mark.parametrize("env_class", NEEDED)


@OF_EACH
@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"sise": 3}, r"^the dataset has no option 'sise'; did you mean 'size'\?"),
        ({"size": 0}, r"^size must be a positive int( or None)?, got 0"),
        ({"size": True}, r"^size must be a positive int( or None)?, got True"),
        ({"seed": -1}, r"^seed must be an int >= 0, got -1"),
    ],
)
def test_all_refuse_an_option_in_the_same_words(
    env_class: type[MultistepEnv], option: dict[str, Any], problem: str
) -> None:
    config, needed = NEEDED[env_class]
    for rows in (env_class.get_train_dataset, env_class.get_eval_dataset):
        with pytest.raises(ConfigError, match=problem):
            rows(config, **needed, **option)


@OF_EACH
def test_rows_are_of_the_class_that_made_them(env_class: type[MultistepEnv]) -> None:
    own = type("Own", (env_class,), {"__module__": __name__})
    config, needed = NEEDED[env_class]
    rows = own.get_train_dataset(config, size=2, **needed)
    assert {row["env_class_path"] for row in rows} == {class_path(own)} == {f"{__name__}.Own"}
    assert {row["env_class_path"] for row in env_class.get_train_dataset(config, size=2, **needed)} == {
        class_path(env_class)
    }


def test_columns_that_are_no_dict_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^columns must be a dict from a task's key to a column of the data, or None"
    ):
        ToolEnv.get_train_dataset(**DATA, columns=["question"])


@given(st.integers(1, 7), st.none() | st.integers(1, 40), st.integers())
def test_each_task_comes_as_often_as_the_others(num_tasks: int, size: int | None, seed: int) -> None:
    order = shuffled(range(num_tasks), size, random.Random(seed))
    counts = Counter(order)
    assert len(order) == (num_tasks if size is None else size)
    assert max(counts.values()) - min(counts[task] for task in range(num_tasks)) <= 1


@given(st.integers(), st.integers())
def test_seeds_of_training_and_evaluation_never_meet(one: int, other: int) -> None:
    assert task_seed("train", "topic", one) % 2 == 0
    assert task_seed("eval", "topic", other) % 2 == 1


class Lazy(GuessEnv):
    """Its train dataset is a generator that raises at its first row; its eval dataset has a bug."""

    calls: ClassVar = 0

    @classmethod
    def get_train_dataset(cls, env_config: Any = None, *, size: int = 3, **options: Any) -> Any:
        return cls._rows()

    @classmethod
    def _rows(cls) -> Iterator[Any]:
        raise NotImplementedError("no rows")
        yield {}

    @classmethod
    def get_eval_dataset(cls, env_config: Any = None, **options: Any) -> Any:
        cls.calls += 1
        raise TypeError("a bug")


def test_a_generator_without_rows_gives_seeds() -> None:
    tasks = tasks_of(Lazy(), "train", {}, 3)
    assert [list(task) for task in tasks] == [["seed"]] * 3


def test_options_without_a_dataset_are_refused() -> None:
    with pytest.raises(ConfigError, match="no options, got size"):
        tasks_of(Lazy(), "train", {"size": 2}, 3)


def test_a_dataset_that_fails_with_options_is_created_once() -> None:
    env, Lazy.calls = Lazy(), 0
    with pytest.raises(ConfigError, match="a bug"):
        tasks_of(env, "eval", {"size": 4}, 3)
    assert env.calls == 1
