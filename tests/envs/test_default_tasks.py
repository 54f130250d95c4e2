"""The tasks that commands play by default: rows of a dataset, whatever its signature, or seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from guess_game import GuessEnv

from agentsgym.envs.datasets.default_tasks import tasks_of
from agentsgym.errors import ConfigError


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
