"""Rows are played wherever tasks are, and never as another environment's."""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from datasets import Dataset, DatasetDict, Features, Json, Value
from guess_game import Counting, GuessEnv, tasks

from agentsgym import ConfigError, Field, TaskError, evaluate, make, register
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.envs.dataset_rows import check_row, drop_null_columns, tasks_of_rows
from agentsgym.envs.datasets.environments import Environments, class_path
from agentsgym.fields import is_int, is_str, or_none
from agentsgym.testing import chat_tokenizer

PATH = class_path(GuessEnv)


def row(config: Any = None, solution: int = 2, path: str = PATH) -> dict[str, Any]:
    return {"env_class_path": path, "env_config": config, "task_data": {"solution": solution, "seed": 0}}


def play(env: Any, rows: Any, how: str) -> Any:
    if how == "evaluate":
        return [list(one.messages) for one in evaluate(env, Counting(), rows).trajectories]
    if how == "rollout":
        return [list(one.messages) for one in env.rollout(rows, Counting())]
    if how == "run_trial":
        return env.run_trial(rows, Counting())["final_completion_messages"]
    return [messages[-1] for messages in env.generate(rows, Counting())["messages"]]


EVERYWHERE = pytest.mark.parametrize("how", ["evaluate", "rollout", "run_trial", "generate"])


@EVERYWHERE
def test_rows_and_tables_of_rows_are_played_as_their_tasks(how: str) -> None:
    env = GuessEnv(env_config={"highest": 5})
    rows = [
        row({"highest": 5}, 2),
        row(None, 4),
        {"task_data": {"solution": 3, "seed": 0}, "prompt": "of another tool"},
    ]
    columns = Features({"env_class_path": Value("string"), "env_config": Json(), "task_data": Json()})
    expected = play(env, tasks(2, 4, 3), how)
    assert play(env, rows, how) == expected
    assert play(env, Dataset.from_list(rows[:2], features=columns), how) == expected[:2]


@EVERYWHERE
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (row(path="my.game"), ConfigError, f"[1] is for the environment 'my.game', but this environment is '{PATH}'"),
        (
            row({"highest": 6}),
            ConfigError,
            "[1] has the env_config {'highest': 6}, but the environment was created with {'highest': 5}: create the "
            "row's environment with agentsgym.make(row, tokenizer)",
        ),
        (row({"higest": 5}), ConfigError, "env_config['higest'] is unknown; did you mean 'highest'?"),
        (row("highest"), ConfigError, "[1] must have a dict or None as its 'env_config', got 'highest'"),
        (
            {"env_class_path": PATH, "env_config": {}},
            TaskError,
            "[1] is a dataset row and must have a 'task_data' (a dict), got the columns ['env_class_path', ",
        ),
        (
            {"task_data": {}, "env_type": "Sokoban"},
            ConfigError,
            f"[1] has the env_type 'Sokoban', but this environment is '{PATH}': name another environment in "
            "env_class_path",
        ),
        ({"task_data": 3}, TaskError, "[1] is a dataset row and must have a 'task_data' (a dict), got 3"),
        (
            {"task_data": row()},
            TaskError,
            "[1]['task_data'] must be a task, got a dict with 'env_class_path', which is a column of a dataset row",
        ),
        (5, TaskError, "[1] must be a task_data dict or a dataset row, got 5"),
    ],
)
def test_a_row_of_something_else_is_refused_before_anything_is_played(
    how: str, wrong: Any, error: type[Exception], message: str
) -> None:
    env = GuessEnv(env_config={"highest": 5})
    with pytest.raises(error, match=re.escape(message)):
        play(env, [row({"highest": 5}), wrong], how)
    assert env.num_initialized == 0


@pytest.mark.parametrize("env_type", ["GuessEnv", "guess", PATH.upper(), None, 3])
def test_a_type_that_names_this_environment_is_a_column_like_any_other(env_type: Any) -> None:
    assert tasks_of_rows(GuessEnv(), [{"task_data": {"seed": 1}, "env_type": env_type}]) == [{"seed": 1}]


def test_a_type_beside_a_path_is_a_column_like_any_other() -> None:
    rows = [{**row(), "env_type": "Sokoban"}, {**row(), "env_type": "easy"}]
    assert len(tasks_of_rows(GuessEnv(), rows)) == 2
    environments = Environments(GuessEnv(chat_tokenizer()), chat_tokenizer())
    environments.check(rows)
    assert environments.of(rows[0]) is environments.of(rows[1])
    environments.check([{"task_data": {}}])
    with pytest.raises(ConfigError, match=r"^row 1 of the dataset: .* has the env_type 'Sokoban'"):
        environments.check([{"task_data": {}}, {"task_data": {}, "env_type": "Sokoban"}])


@pytest.mark.parametrize("env_type", ["TwentyQuestions", "twentyquestionsenv"])
def test_a_packaged_environment_has_the_name_of_its_folder_and_of_its_class(env_type: str) -> None:
    rows = [{"task_data": {"solution": "clock"}, "env_type": env_type}]
    assert tasks_of_rows(TwentyQuestionsEnv(), rows) == [{"solution": "clock"}]


def test_a_row_inside_a_task_is_refused() -> None:
    with pytest.raises(TaskError, match=r"task_data must be a task, got a dict with 'task_data'"):
        GuessEnv().check_task({"task_data": {"solution": 3}})


@pytest.mark.parametrize("config", [{}, {"highest": 9}, {"highest": None, "of_another": None}, None])
def test_a_configuration_is_the_same_however_much_of_it_is_written(config: Any) -> None:
    check_row(GuessEnv(), row(config))
    check_row(GuessEnv(env_config={"highest": 9, "error_allowance": 1}), row(config))


class Hungry(GuessEnv):
    """Takes a key of its own out before the base sees it, and turns another into one of the base's."""

    def __init__(self, tokenizer: Any = None, env_config: Any = None) -> None:
        config = {"max_steps_per_episode": 6, **(env_config or {})}
        self.level = config.pop("level", 1)
        config["highest"] = 10 * config.get("highest", 1)
        super().__init__(tokenizer, config)


@pytest.mark.parametrize(
    ("given", "config", "is_same"),
    [
        ({"level": 2}, {"level": 2}, True),
        ({"level": 2}, {"level": 3}, False),
        ({"level": 2}, {}, False),
        ({}, {"level": 2}, False),
        ({"level": [1, 2]}, {"level": [1, 2]}, True),
        (None, {}, True),
        (None, {"max_steps_per_episode": 6}, True),
        (None, {"max_steps_per_episode": 20}, False),
        ({"max_steps_per_episode": 20}, {}, False),
        ({"highest": 2}, {"highest": 2}, True),
        ({"highest": 2}, {"highest": 20}, False),
    ],
)
def test_rows_are_compared_with_what_the_class_was_called_with(given: Any, config: Any, is_same: bool) -> None:
    for env in (Hungry(None, given), Hungry(env_config=given)):
        assert env.given_config == (given or {"max_steps_per_episode": 6, "highest": 10} if given is None else given)
        if is_same:
            check_row(env, row(config, path=class_path(Hungry)))
        else:
            with pytest.raises(ConfigError, match="the environment was created with"):
                check_row(env, row(config, path=class_path(Hungry)))


def test_what_is_given_is_kept_apart_from_the_dict_that_it_came_in() -> None:
    given = {"level": [1], "highest": 2}
    env = Hungry(None, given)
    given["level"].append(2)  # type: ignore[attr-defined]
    assert env.given_config == {"level": [1], "highest": 2}


class Judged(GuessEnv):
    """Has a setting that no row can name, and one that JSON writes otherwise."""

    config_fields: ClassVar = {
        **GuessEnv.config_fields,
        "judge": Field(default=None, expected="a callable or None", valid=or_none(callable)),
        "names": Field(default=(), expected="names", valid=lambda value: isinstance(value, list | tuple)),
    }


def test_a_row_omits_what_json_cannot_hold() -> None:
    env = Judged(env_config={"judge": print, "names": ("a", "b")})
    assert env.given_config == {"names": ("a", "b")}
    path = class_path(Judged)
    check_row(env, row({"names": ["a", "b"]}, path=path))
    check_row(env, row(json.loads(json.dumps(env.given_config)), path=path))
    with pytest.raises(ConfigError, match="was created with"):
        check_row(env, row({"names": ["a"]}, path=path))


def test_each_configuration_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env = GuessEnv(env_config={"highest": 9})
    built: list[Any] = []

    class Counted(GuessEnv):
        """Counts how often it is built."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            built.append(arguments)
            super().__init__(*arguments, **options)

    env = Counted(None, {"highest": 9})
    assert len(tasks_of_rows(env, [row({}, path=class_path(Counted))] * 50)) == 50
    assert len(built) == 2


class Browsing(GuessEnv):
    """Needs a tokenizer and a third argument, and opens something."""

    opened: ClassVar[list[Any]] = []

    def __init__(self, tokenizer: Any, env_config: Any, browser: Any) -> None:
        super().__init__(tokenizer, env_config)
        self.num_ids = len(tokenizer)
        self.opened.append(browser)


def test_a_row_that_holds_more_is_compared_without_a_second_environment(caplog: pytest.LogCaptureFixture) -> None:
    given = {"highest": 5, "free_shots": 1, "episodes_per_trial": 2}
    Browsing.opened.clear()
    with caplog.at_level(logging.WARNING):
        env = Browsing(chat_tokenizer(), given, "firefox")
        check_row(env, row({**given, "max_steps_per_episode": 20}, path=class_path(Browsing)))
        with pytest.raises(ConfigError, match="but the environment was created with"):
            check_row(env, row({**given, "max_steps_per_episode": 3}, path=class_path(Browsing)))
    assert Browsing.opened == ["firefox"]
    assert len(caplog.records) == 1


def test_a_row_whose_environment_cannot_be_built_is_of_another_configuration() -> None:
    env = Browsing(chat_tokenizer(), {"highest": 9}, "firefox")
    for config in ({}, {"of_another": 3}):
        with pytest.raises(ConfigError, match=r"has the env_config \{.*but the environment was created with") as caught:
            check_row(env, row(config, path=class_path(Browsing)))
        assert isinstance(caught.value.__cause__, TypeError)


def test_a_row_that_leaves_out_what_was_given_is_built_with_the_environments_tokenizer() -> None:
    class Filling(GuessEnv):
        """Has another default than its field states, and counts the tokenizer's words."""

        def __init__(self, tokenizer: Any, env_config: Any) -> None:
            super().__init__(tokenizer, {"highest": len(tokenizer), **env_config})

    tokenizer = chat_tokenizer()
    path, own = class_path(Filling), len(tokenizer)
    check_row(Filling(tokenizer, {}), row({"highest": own}, path=path))
    check_row(Filling(tokenizer, {"highest": own}), row({}, path=path))
    with pytest.raises(ConfigError, match="was created with"):
        check_row(Filling(tokenizer, {"highest": 9}), row({}, path=path))  # 9 is the field's default
    with pytest.raises(ConfigError, match=r"has an invalid env_config: env_config\['highest'\] must be"):
        check_row(Filling(tokenizer, {}), row({"highest": -1}, path=path))


DATASET = Dataset.from_list([{"task_data": {"solution": 2, "seed": 0}}] * 300)


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (DATASET[:2], ": a slice of a dataset is a dict of its columns; for its first rows, write dataset.select(ran"),
        (DatasetDict(test=DATASET), ": pass one of its splits, as in dataset['test']"),
        ({"solution": 3}, "got {'solution': 3}"),
    ],
)
def test_rows_by_column_or_by_split_are_refused_with_the_remedy(rows: Any, remedy: str) -> None:
    with pytest.raises(TaskError, match=r"^task_data_list must be a list of task_data dicts, got .*") as caught:
        GuessEnv().rollout(rows, Counting())
    assert remedy in str(caught.value)
    with pytest.raises(TaskError) as caught:
        GuessEnv().rollout(DATASET[:], Counting())
    assert len(str(caught.value)) < 400


class Keyed(GuessEnv):
    """Reports which keys its tasks have."""

    task_fields: ClassVar = ("solution", "hint")

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        super()._check_task(task_data)


def test_a_key_that_a_task_cannot_have_is_named_with_the_nearest_one() -> None:
    env = Keyed()
    env.check_task({"solution": 3, "seed": 1, "of_another": None})
    with pytest.raises(TaskError, match=re.escape("task_data_list[1]['hnt'] is unknown; did you mean 'hint'?")):
        env.rollout([{"solution": 3}, {"hnt": "x"}], Counting())
    GuessEnv().check_task({"solution": 3, "anything": 1})


def test_twenty_questions_refuses_keys_that_it_does_not_know() -> None:
    env = TwentyQuestionsEnv()
    with pytest.raises(TaskError, match=re.escape("task_data['soluton'] is unknown; did you mean 'solution'?")):
        env.check_task({"soluton": "clock"})
    env.check_task({"solution": "clock", "seed": 3})


class Worded(GuessEnv):
    """A registered class whose default is a string."""

    config_fields: ClassVar = {"word": Field(default="a", expected="a str", valid=is_str)}


def test_rows_of_an_environment_are_played_by_what_make_builds_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})
    register(Worded, "my.words")
    rows = [row({"word": word}, path="my.words") for word in ("a", "b")]
    for one, other in (rows, rows[::-1]):
        env = make(one)
        assert tasks_of_rows(env, [one]) == [one["task_data"]]
        with pytest.raises(ConfigError, match=r"task_data_list\[0\] has the env_config"):
            tasks_of_rows(env, [other])


def test_a_null_stays_where_the_class_takes_it() -> None:
    class Nullable(GuessEnv):
        """Takes None for one of its keys."""

        config_fields: ClassVar = {"limit": Field(default=3, expected="an int or None", valid=or_none(is_int(1)))}

    assert drop_null_columns({"limit": None, "free_shots": None, "other": None}, Nullable) == {"limit": None}
