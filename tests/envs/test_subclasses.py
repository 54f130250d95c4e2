"""What a subclass may not override, what it is given of its keys, and what its datasets know of an instance."""

import copy
import logging
import pickle
import re
from typing import Any, ClassVar

import pytest
from datasets import Dataset
from guess_game import Counting, GuessEnv

from agentsgym import ConfigError, Field, MultistepEnv
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.fields import is_int


@pytest.mark.parametrize(
    ("name", "hooks"), [("run_trial", "_step_episode, _final_reward"), ("_run_complete_episode", "_initialize_episode")]
)
def test_an_override_that_nothing_calls_is_refused_with_the_hooks_to_use(name: str, hooks: str) -> None:
    sentence = f"Own.{name} would never be called: evaluate and the trainer play episodes only through the hooks"
    with pytest.raises(ConfigError, match=rf"{re.escape(sentence)}; override {hooks}"):
        type("Own", (GuessEnv,), {name: lambda self, *arguments: {}})
    mixin = type("Mixin", (), {name: lambda self, *arguments: {}})
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        type("Own", (mixin, GuessEnv), {})


def test_hooks_and_rollout_may_be_overridden() -> None:
    names = ["_step_episode", "_final_reward", "_calculate_rewards", "_close_episode", "rollout", "generate"]
    assert type("Own", (GuessEnv,), {name: lambda self, *arguments: None for name in names})()


HINT = "; a class declares additional keys in config_fields"


def test_a_key_of_a_classs_own_is_refused_with_where_to_declare_it() -> None:
    class Adding(GuessEnv):
        """Hands the base a key that it never declared."""

        def __init__(self, tokenizer: Any = None, env_config: Any = None) -> None:
            super().__init__(tokenizer, {**(env_config or {}), "higher": 3})

    with pytest.raises(ConfigError) as caught:
        Adding(env_config={"highest": 3})
    assert str(caught.value) == "env_config['higher'] is unknown; did you mean 'highest'?" + HINT
    with pytest.raises(ConfigError) as caught:
        GuessEnv(env_config={"level": 3})
    assert str(caught.value).endswith("'unguarded_tokens'" + HINT)
    with pytest.raises(ConfigError) as caught:
        GuessEnv(env_config={"higher": 3})
    assert str(caught.value) == "env_config['higher'] is unknown; did you mean 'highest'?"


def test_a_key_that_a_constructor_adds_is_distinguished_from_a_slip_of_the_pen_however_it_is_called() -> None:
    def adding(self: Any, tokenizer: Any = None, env_config: Any = None) -> None:
        GuessEnv.__init__(self, tokenizer, {**(env_config or {}), "higher": 3})

    for given in ({}, {"env_config": None}, {"env_config": {}}):
        with pytest.raises(ConfigError) as caught:
            type("Adding", (GuessEnv,), {"__init__": adding})(**given)
        assert str(caught.value) == "env_config['higher'] is unknown; did you mean 'highest'?" + HINT


def test_the_configuration_is_found_by_the_name_of_its_parameter() -> None:
    class Worded(GuessEnv):
        """Takes it third."""

        def __init__(self, tokenizer: Any, words: Any, env_config: Any = None) -> None:
            self.words = words
            super().__init__(tokenizer, env_config)

    class Passing(GuessEnv):
        """Hands on what it is given."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Short(GuessEnv):
        """Has another name for it, and takes a key out."""

        def __init__(self, tokenizer: Any = None, config: Any = None) -> None:
            self.level = config.pop("level")
            super().__init__(tokenizer, config)

    assert Worded(None, {"clock": 1}, {"highest": 3}).given_config == {"highest": 3}
    assert Worded(None, {"clock": 1}).given_config == {}
    assert Passing(None, {"highest": 3}).given_config == Passing(env_config={"highest": 3}).given_config
    assert Passing(None, {"highest": 3}).given_config == {"highest": 3}
    assert Short(None, {"level": 2, "highest": 3}).given_config == {"level": 2, "highest": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'cofnig'"):
        Short(cofnig={})


class Leveled(GuessEnv):
    """Ships tasks; its datasets are plain class methods, as anyone writes them."""

    config_fields: ClassVar = {**GuessEnv.config_fields, "level": Field(default=1, expected="an int", valid=is_int(1))}

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Rows of one task."""
        return [{"env_config": env_config, "task_data": {"class": cls.__name__, **kwargs}}]


class Sub(Leveled):
    """Builds on its base's tasks."""

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Twice those of the base."""
        return super().get_train_dataset(env_config, **kwargs) * 2


def config_and_task(dataset: Any) -> tuple[Any, Any]:
    return dataset[0]["env_config"], dataset[0]["task_data"]


@pytest.mark.parametrize("env_class", [Leveled, Sub])
def test_datasets_of_an_instance_are_of_its_configuration(env_class: Any) -> None:
    task = {"class": env_class.__name__, "size": 3}
    env = env_class(None, {"level": 2})
    assert config_and_task(env.get_train_dataset(size=3)) == ({"level": 2}, task)
    assert config_and_task(env.get_train_dataset({"level": 5}, size=3)) == ({"level": 5}, task)
    assert config_and_task(env.get_train_dataset(env_config={}, size=3)) == ({}, task)
    assert config_and_task(env_class.get_train_dataset(size=3)) == (None, task)
    assert config_and_task(env_class.get_train_dataset({"level": 5}, size=3)) == ({"level": 5}, task)
    assert "Rows of one task." in str(Leveled.get_train_dataset.__doc__)
    assert env_class.get_train_dataset.__name__ == env.get_train_dataset.__name__ == "get_train_dataset"
    with pytest.raises(NotImplementedError, match=f"{env_class.__name__} ships no evaluation tasks"):
        env.get_eval_dataset()


def test_a_mixins_datasets_know_the_instance_too() -> None:
    class Tasks:
        """No environment."""

        @classmethod
        def get_eval_dataset(cls, env_config: Any = None) -> Any:
            return env_config

    class Mixed(Tasks, GuessEnv):  # type: ignore[misc]
        """Takes its tasks from elsewhere."""

    assert Mixed(env_config={"highest": 4}).get_eval_dataset() == {"highest": 4}
    assert Mixed.get_eval_dataset() is None
    assert Tasks().get_eval_dataset() is None


def test_twenty_questions_rows_are_of_the_instance_without_what_no_row_can_hold() -> None:
    config = {"objects": ("dog", "cat", "clock", "car"), "max_steps_per_episode": 7}
    env = TwentyQuestionsEnv(None, {**config, "gamemaster": lambda solution, question: "Yes."})
    for dataset in (env.get_train_dataset(), env.get_eval_dataset()):
        assert isinstance(dataset, Dataset)
        assert {row["task_data"]["solution"] for row in dataset} < {"dog", "cat", "clock", "car"}
        assert dataset[0]["env_config"] == {"objects": ["dog", "cat", "clock", "car"], "max_steps_per_episode": 7}
        assert len(env.rollout(dataset, Counting(), max_concurrent=1)) == len(dataset)


class Sized(GuessEnv):
    """Its tasks have a size, and no configuration."""

    @classmethod
    def get_train_dataset(cls, size: int = 3) -> Any:
        """Rows of one size."""
        return cls.__name__, size

    @classmethod
    def get_eval_dataset(cls, size: int = 3, env_config: Any = None) -> Any:
        """Rows of one size."""
        return size, env_config


def test_datasets_without_a_configuration_are_called_as_they_are_written() -> None:
    env = Sized(None, {"highest": 4})
    assert env.get_train_dataset() == ("Sized", 3)
    assert env.get_train_dataset(5) == env.get_train_dataset(size=5) == ("Sized", 5)
    assert env.get_eval_dataset(5) == env.get_eval_dataset(5, None) == (5, {"highest": 4})
    assert env.get_eval_dataset(5, {}) == (5, {})
    with pytest.raises(TypeError, match=r"get_train_dataset\(\) got an unexpected keyword argument 'number'"):
        env.get_train_dataset(number=5)  # type: ignore[call-arg]
    env.get_eval_dataset()[1].clear()
    assert env.given_config == {"highest": 4}


class Sorted(TwentyQuestionsEnv):
    """Takes a key of its own out before the base sees it, and needs a third argument."""

    def __init__(self, tokenizer: Any, env_config: Any, order: str) -> None:
        config = dict(env_config)
        self.level, self.order = config.pop("level", 1), order
        config["max_steps_per_episode"] = 2 * config.get("max_steps_per_episode", 1)
        super().__init__(tokenizer, config)


def always(solution: str, question: str) -> str:
    return "Yes."


COPIES = [copy.copy, copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_knows_what_the_original_was_called_with(copied: Any) -> None:
    assert copied(Leveled(None, {"level": 2})).given_config == {"level": 2}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_twenty_questions_keeps_what_its_constructor_took_out(copied: Any) -> None:
    given = {"level": 7, "max_steps_per_episode": 3, "objects": ("dog", "cat", "clock"), "gamemaster": always}
    env = Sorted(None, given, "by name")
    again = copied(env)
    assert (again.level, again.order, again.env_config) == (7, "by name", env.env_config)
    assert again.env_config["max_steps_per_episode"] == 6
    assert again.given_config == env.given_config == {key: given[key] for key in given if key != "gamemaster"}
    assert again.knowledge is env.knowledge
    tasks = [{"solution": "clock", "seed": 1}]
    assert again.rollout(tasks, Counting())[0].messages == env.rollout(tasks, Counting())[0].messages


@pytest.mark.parametrize("given", [{"free_shots": 1}, {"free_shots": 1, "keep_history": False}])
def test_practice_that_nobody_remembers_is_warned_of(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        GuessEnv(env_config={"episodes_per_trial": 2, **given})
    [record] = caplog.records
    needed = "env_config['keep_history'] = True, which shows the practice episodes"
    assert record.getMessage() == f"env_config['free_shots'] = 1 has no effect without {needed}"


def test_practice_that_is_remembered_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    GuessEnv(env_config={"episodes_per_trial": 2, "free_shots": 1, "keep_history": True})
    GuessEnv(env_config={"episodes_per_trial": 2, "keep_history": True})
    assert caplog.records == []


def test_episodes_that_no_trajectory_records_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    env = GuessEnv(env_config={"episodes_per_trial": 3, "free_shots": 1, "max_steps_per_episode": 2})
    assert env.rollout([{"solution": 9}], Counting())[0].num_turns == 2  # of 6
    assert [record.getMessage() for record in caplog.records if "records only" in record.getMessage()] == [
        "env_config['episodes_per_trial'] = 3 with env_config['keep_history'] = False records only the last episode of "
        "a trial: the turns and rewards of the others are dropped"
    ]


def test_the_base_class_is_no_environment() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MultistepEnv()  # type: ignore[abstract]
