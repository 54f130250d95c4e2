"""Settings and commands of TextWorld and ScienceWorld, without their engines."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym import ConfigError, TaskError
from agentsgym.envs import EnvSpec, ScienceWorldEnv, TextWorldEnv
from agentsgym.envs.datasets.naming import find_env, known_names
from agentsgym.envs.ScienceWorld.env import TASKS
from agentsgym.envs.shared.text_worlds import MAX_COMMAND_CHARS, format_commands, read_command
from agentsgym.envs.TextWorld.engine import narrative, opening
from agentsgym.envs.TextWorld.env import FILES, KINDS, checked_game_options


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"kind": "coins"}, "env_config['kind'] must be one of 'custom', 'coin_collector', "),
        ({"options": {"room": 3}}, "['options'] of kind 'custom' has no option 'room'; did you mean 'rooms'?"),
        ({"options": {"rooms": 0}}, "env_config['options']['rooms'] must be a positive int, got 0"),
        ({"options": [3]}, "env_config['options'] must be a dict of options of the kind, got [3]"),
        ({"kind": "treasure_hunter", "options": {"level": 31}}, "must be an int from 1 to 30, got 31"),
        ({"kind": "coin_collector", "options": {"level": 151}}, "has 102 rooms, but TextWorld supports at most 100"),
        ({"kind": "cooking", "options": {"take": 2}}, "must be at most env_config['options']['recipe'] = 1, got 2"),
        ({"kind": "cooking", "options": {"go": 2}}, "env_config['options']['go'] must be 1, 6, 9 or 12, got 2"),
        ({"kind": "cooking", "options": {"recipe_seed": 1}}, "recipe_seed'] only selects which ingredients"),
        ({"kind": "files", "options": {"level": 1}}, "env_config['options'] of kind 'files' has no option 'level'"),
        ({"reward": "dense"}, "env_config['reward'] must be one of 'score', 'win', got 'dense'"),
        ({"progress_share": 1.5}, "env_config['progress_share'] must be a number in [0, 1], got 1.5"),
        ({"num_processes": 0}, "env_config['num_processes'] must be a positive int, got 0"),
    ],
)
def test_settings_that_do_not_go_are_refused_in_words(config: dict[str, Any], problem: str) -> None:
    for build in (lambda: TextWorldEnv(env_config=config), lambda: TextWorldEnv.get_train_dataset(config)):
        with pytest.raises(ConfigError) as caught:
            build()
        assert problem in str(caught.value)


def test_the_command_line_names_every_kind() -> None:
    listed = {name.removeprefix("TextWorld:") for name in known_names() if name.startswith("TextWorld:")}
    assert listed | {FILES} == {*KINDS}
    named = find_env("TextWorld:cooking", {"options": {"recipe": 2}})
    assert (named.env_class, named.env_config) == (TextWorldEnv, {"kind": "cooking", "options": {"recipe": 2}})


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_every_kind_go(kind: str) -> None:
    options = checked_game_options(kind, {})
    assert checked_game_options(kind, options) == options


@settings(max_examples=10)  # each makes two data sets
@given(st.integers(min_value=0, max_value=10**6), st.integers(min_value=1, max_value=40))
def test_training_and_evaluation_share_no_game(seed: int, size: int) -> None:
    train, held_out = (
        [row["task_data"] for row in rows(None, size=size, seed=seed)]
        for rows in (TextWorldEnv.get_train_dataset, TextWorldEnv.get_eval_dataset)
    )
    assert {task["game_seed"] % 2 for task in train} == {0}
    assert {task["game_seed"] % 2 for task in held_out} == {1}
    assert all(0 <= task["game_seed"] < 2**31 for task in (*train, *held_out))


def test_rows_take_a_few_games_in_turn() -> None:
    rows = TextWorldEnv.get_train_dataset({"kind": "cooking"}, size=7, num_games=3)
    games = [row["task_data"]["game_seed"] for row in rows]
    assert games[:3] == games[3:6]
    assert len({*games}) == 3
    assert len({row["task_data"]["seed"] for row in rows}) == 7
    assert rows[0]["env_class_path"] == "agentsgym.envs.TextWorld.TextWorldEnv"


def test_files_are_shared_out_and_must_be_there(tmp_path: Path) -> None:
    config = {"kind": FILES}
    with pytest.raises(ConfigError, match=r"or a list of paths, but no \.z8 files were found"):
        TextWorldEnv.get_train_dataset(config, files=str(tmp_path))
    with pytest.raises(ConfigError, match="files must be a folder or a list of paths, got None"):
        TextWorldEnv.get_train_dataset(config)
    with pytest.raises(ConfigError, match="the dataset has no option 'files'"):
        TextWorldEnv.get_train_dataset(None, files=["a.z8"])
    names = [f"{n}.z8" for n in range(10)]
    train, held_out = (
        {row["task_data"]["file"] for row in rows(config, files=names)}
        for rows in (TextWorldEnv.get_train_dataset, TextWorldEnv.get_eval_dataset)
    )
    assert (train | held_out, len(held_out)) == ({*names}, 2)


@pytest.mark.skipif(importlib.util.find_spec("textworld") is not None, reason="a machine that has TextWorld")
def test_without_textworld_rows_can_be_made_and_nothing_be_built() -> None:
    assert len(TextWorldEnv.get_train_dataset(size=3)) == 3
    with pytest.raises(ImportError, match=r"pip install 'agentsgym\[textworld\]'"):
        TextWorldEnv()


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment whose engine is never started, wherever the tests run."""
    monkeypatch.setattr(TextWorldEnv, "spec", EnvSpec())
    return partial(TextWorldEnv, None)


@pytest.mark.parametrize(
    ("config", "task", "problem"),
    [
        ({}, {"game_seed": -1}, r"task_data\['game_seed'\] must be an int from 0 to 2\*\*32 - 1, got -1"),
        ({}, {"game_seed": "3"}, r"must be an int from 0 to 2\*\*32 - 1, got '3'"),
        ({}, {"game_sed": 3}, r"'game_sed'\] is unknown; did you mean 'game_seed'\?"),
        ({}, {"file": "a.z8"}, r"is only valid if env_config\['kind'\] is 'files', but it is 'custom'"),
        ({"kind": "files"}, {}, r"task_data\['file'\] must be the path of a .z8 file, as written by tw-make, got None"),
        ({"kind": "files"}, {"file": "gone.z8"}, "as written by tw-make, got 'gone.z8'"),
    ],
)
def test_tasks_that_cannot_be_played_are_refused(
    env: Any, config: dict[str, Any], task: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TaskError, match=problem):
        env(config).check_task(task)


def test_a_game_needs_its_description(env: Any, tmp_path: Path) -> None:
    (tmp_path / "a.z8").write_bytes(b"\x08")
    with pytest.raises(TaskError, match=r"needs its description a\.json next to it"):
        env({"kind": "files"}).check_task({"file": str(tmp_path / "a.z8")})


BANNER = [
    "                    ________  ________  __    __  ________        ",
    r"                   |        \|        \|  \  |  \|        \       ",
    r"                    \$$$$$$$$| $$$$$$$$| $$  | $$ \$$$$$$$$       ",
]
FEEDBACK = ["", "", *BANNER, "", "Find the coin!", "", "-= Attic =-", "An attic.", "", "", "", ">      -= Attic =-0/1"]


def test_feedback_is_cut_down_to_its_message() -> None:
    assert opening("\n".join(FEEDBACK)) == "Find the coin!\n\n-= Attic =-\nAn attic."
    ended = "\nYou take it.\n\n\n   *** The End ***\n\nWould you like to RESTART, RESTORE a saved game, QUIT or UNDO "
    assert narrative(f"{ended}the last command?\n>  -= Attic =-0/5") == "You take it.\n\n   *** The End ***"


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
def test_scienceworld_settings_that_do_not_go_are_refused(config: dict[str, Any], problem: str) -> None:
    for build in (lambda: ScienceWorldEnv(env_config=config), lambda: ScienceWorldEnv.get_train_dataset(config)):
        with pytest.raises(ConfigError) as caught:
            build()
        assert problem in str(caught.value)


@pytest.fixture
def scienceworld(monkeypatch: pytest.MonkeyPatch) -> Any:
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
def test_scienceworld_tasks_that_cannot_be_played_are_refused(
    scienceworld: Any, config: dict[str, Any], task: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TaskError, match=problem):
        scienceworld(config).check_task(task)


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


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("go east", "go east"),
        ("  Take  the\tkey. ", "Take the key"),
        ("I go there.\n\n> go east\n", "go east"),
        ("<action>open door</action> or <ACTION>\nlook\n</ACTION> because", "look"),
        ("I open it. <action>open door", "open door"),  # cut at a stop string
        ("take \0coin\x07", "take coin"),  # a NUL ends TextWorld's interpreter
        ("[go east]", "go east"),
        ("`go east`", "go east"),
        ('" go east. "', "go east"),
        ("", None),
        (" \n>. \n", None),
        ("go " * 100, None),
    ],
)
def test_one_command_is_read(message: str, command: str | None) -> None:
    assert read_command(message) == command


@given(st.text())
def test_whatever_is_answered_a_command_is_one_short_line(message: str) -> None:
    command = read_command(message)
    assert command is None or (0 < len(command) <= MAX_COMMAND_CHARS and len(command.splitlines()) == 1)
    assert command is None or (command == " ".join(command.split()) and command.isprintable())


@given(st.lists(st.from_regex(r"[a-z]+( [a-z]+){0,3}", fullmatch=True), min_size=1))
def test_every_command_that_is_listed_is_read_as_it_stands(commands: list[str]) -> None:
    assert format_commands(commands).removeprefix("Possible commands: ").split(", ") == commands
    assert [read_command(command) for command in commands] == commands
