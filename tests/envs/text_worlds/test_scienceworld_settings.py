"""ScienceWorldEnv without Java: what is checked before anything is started, and the rows of its datasets."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agentsgym.envs.ScienceWorld import ScienceWorldEnv
from agentsgym.envs.ScienceWorld.env import TASKS
from agentsgym.envs.spec import EnvSpec
from agentsgym.errors import ConfigError, TaskError


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"simplifications": ["eazy"]}, "a list of distinct names from easy, noElectricalAction, openContainers"),
        ({"simplifications": "easy"}, "must be a list of distinct names from easy, "),
        ({"simplifications": ["easy", "easy"]}, "must be a list of distinct names from easy, "),
        ({"memory_mb": 100}, "env_config['memory_mb'] must be an int of at least 256, got 100"),
        ({"failure_score": "0"}, "env_config['failure_score'] must be a number, got '0'"),
        ({"gold_paths": True}, "env_config['gold_paths'] is unknown; did you mean 'gold_path'?"),
    ],
)
def test_settings_that_do_not_go_are_refused_in_words(config: dict[str, Any], problem: str) -> None:
    for build in (lambda: ScienceWorldEnv(env_config=config), lambda: ScienceWorldEnv.get_train_dataset(config)):
        with pytest.raises(ConfigError) as caught:
            build()
        assert problem in str(caught.value)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment whose engine is never started, wherever the tests run."""
    monkeypatch.setattr(ScienceWorldEnv, "spec", EnvSpec())
    monkeypatch.setattr("agentsgym.envs.ScienceWorld.env.find_java", lambda: "java")
    return partial(ScienceWorldEnv, None)


@pytest.mark.parametrize(
    ("config", "task", "problem"),
    [
        ({}, {"task": "boyl"}, r"must be the name of a ScienceWorld task, got 'boyl'; did you mean 'boil'\?"),
        ({}, {}, "must be the name of a ScienceWorld task, got None"),
        ({}, {"task": ["boil"]}, r"must be the name of a ScienceWorld task, got \['boil'\]"),
        ({}, {"task": "boil", "variation": 30}, r"of 'boil' must be an int from 0 to 29, got 30"),
        ({}, {"task": "boil", "variation": True}, r"of 'boil' must be an int from 0 to 29, got True"),
        ({"simplifications": ["noElectricalAction"]}, {"task": "test-conductivity"}, "needs wires, which"),
    ],
)
def test_tasks_that_cannot_be_played_are_refused(
    env: Any, config: dict[str, Any], task: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TaskError, match=problem):
        env(config).check_task(task)


def test_the_splits_share_no_variation_and_leave_none_out() -> None:
    assert len(TASKS) == 30
    for one in TASKS.values():
        assert [*one.indices("train"), *one.indices("dev"), *one.indices("test")] == [*range(one.num)]


def variations(rows: Any) -> set[tuple[str, int]]:
    return {(row["task_data"]["task"], row["task_data"]["variation"]) for row in rows}


def test_rows_have_the_variations_of_their_split() -> None:
    names = ["boil", "find-plant"]
    train = variations(ScienceWorldEnv.get_train_dataset(tasks=names))
    dev, test = (variations(ScienceWorldEnv.get_eval_dataset(tasks=names, split=split)) for split in ("dev", "test"))
    assert len(train | dev | test) == len(train) + len(dev) + len(test) == 330
    assert variations(ScienceWorldEnv.get_eval_dataset(tasks=names)) == dev
    assert len(ScienceWorldEnv.get_train_dataset()) == sum(one.train for one in TASKS.values())
    few = ScienceWorldEnv.get_train_dataset(num_variations=4)
    assert len(few) == 120
    with pytest.raises(ConfigError, match=r"got 'boyl'; did you mean 'boil'\?"):
        ScienceWorldEnv.get_train_dataset(tasks=["boyl"])
    with pytest.raises(ConfigError, match="split must be 'dev' or 'test', got 'train'"):
        ScienceWorldEnv.get_eval_dataset(split="train")
