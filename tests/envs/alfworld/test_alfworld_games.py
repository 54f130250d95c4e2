"""The games of a data folder: which there are, which are left out, and what is noted about them, without an engine."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentsgym import ConfigError, TaskError, check_env
from agentsgym.envs import ALFWorldEnv
from agentsgym.envs.ALFWorld.env import find_games, game_file

PICK, HEAT = "pick_and_place_simple", "pick_heat_then_place_in_recep"
GAME = {"pddl_domain": "", "grammar": "", "pddl_problem": "", "solvable": True, "walkthrough": ["look"]}


def write_game(data: Path, place: str, kind: str = PICK, **changes: Any) -> Path:
    trial = data / "json_2.1.1" / place
    trial.mkdir(parents=True)
    (trial / "traj_data.json").write_text(json.dumps({"task_type": kind}))
    (trial / "game.tw-pddl").write_text(json.dumps({**GAME, **changes}))
    return trial


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for split, count in (("train", 4), ("valid_seen", 1), ("valid_unseen", 2)):
        for index in range(count):
            write_game(folder, f"{split}/{PICK}-Mug-None-Shelf-{index}/trial_T0", HEAT if index == 1 else PICK)
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the packages of the engine be found; no test here imports them."""
    for name in ("alfworld", "textworld"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text("raise ImportError('no engine runs in these tests')")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))


def test_the_splits_are_datasets(data: Path) -> None:
    config = {"data": str(data)}
    rows = ALFWorldEnv.get_train_dataset(config)
    assert len(rows) == 4
    assert rows[0]["env_class_path"] == "agentsgym.envs.ALFWorld.ALFWorldEnv"
    assert {row["task_data"]["task_type"] for row in rows} == {PICK, HEAT}
    assert all((data / row["task_data"]["game"]).is_file() for row in rows)
    for split, count in (("eval_in_distribution", 1), ("valid_seen", 1), ("eval_out_of_distribution", 2), ("train", 4)):
        assert len(ALFWorldEnv.get_eval_dataset(config, split=split)) == count
    assert len(ALFWorldEnv.get_eval_dataset(config)) == 2  # valid_unseen
    assert len(ALFWorldEnv.get_train_dataset(config, size=10)) == 10
    assert len(ALFWorldEnv.get_train_dataset(config, task_types=[HEAT])) == 1
    one, other = (ALFWorldEnv.get_train_dataset(config, seed=seed)["task_data"] for seed in (1, 2))
    assert [task["game"] for task in one] != [task["game"] for task in other]
    assert {task["game"] for task in one} == {task["game"] for task in other}


def test_the_folder_may_be_named_by_the_variable_or_be_the_inner_one(data: Path, monkeypatch: Any) -> None:
    inner = find_games(data / "json_2.1.1", "train")
    assert [f"json_2.1.1/{one['game']}" for one in inner] == [one["game"] for one in find_games(data, "train")]
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    assert len(ALFWorldEnv.get_train_dataset()) == 4
    assert ALFWorldEnv.get_train_dataset()[0]["env_config"] == {}


def test_what_the_engine_cannot_play_is_left_out_and_counted(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_game(data, "train/pick_and_place_with_movable_recep-Mug-Plate-Shelf-1/trial_T0")
    write_game(data, "train/pick_and_place_simple-AppleSliced-None-Shelf-1/trial_T0")
    write_game(data, "train/unsolvable/trial_T0", solvable=False)
    write_game(data, "train/unknown/trial_T0", solvable=None)
    write_game(data, "train/other/trial_T0", kind="stack_things")
    (write_game(data, "train/no game/trial_T0") / "game.tw-pddl").unlink()
    (write_game(data, "train/broken/trial_T0") / "game.tw-pddl").write_text("{")
    (write_game(data, "train/no type/trial_T0") / "traj_data.json").write_text("[]")
    with caplog.at_level(logging.INFO):
        found = find_games(data, "train")
    assert len(found) == 4
    [counts] = [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]
    assert "has 4 games; skipped: " in counts
    assert {*counts.partition("skipped: ")[2].split(", ")} == {
        "2 movable or sliced",
        "2 not known to be solvable",
        "1 of another task type",
        "1 without a game file",
        "2 unreadable",
    }


def test_what_is_noted_is_read_again_when_a_file_changes(
    data: Path, user_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = find_games(data, "train")
    [cache] = (user_cache / "agentsgym" / "alfworld").iterdir()
    assert json.loads(cache.read_text())["trials"]
    trial = data / Path(first[0]["game"]).parent
    (trial / "traj_data.json").write_text(json.dumps({"task_type": HEAT, "longer": 1}))
    assert find_games(data, "train")[0]["task_type"] == HEAT
    (trial / "game.tw-pddl").write_text(json.dumps({**GAME, "solvable": False}))
    with caplog.at_level(logging.INFO):
        find_games(data, "train")
    assert "skipped: 1 not known to be solvable" in caplog.text
    shutil.rmtree(trial)
    assert len(find_games(data, "train")) == 3
    write_game(data, "train/new/trial_T0")
    assert len(find_games(data, "train")) == 4


def test_nothing_is_read_twice(data: Path) -> None:
    first = find_games(data, "train")
    for path in (data / "json_2.1.1" / "train").rglob("*.json"):
        known = path.stat()
        path.write_text("x" * known.st_size)  # unreadable, if it were read
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert find_games(data, "train") == first


@pytest.mark.parametrize("content", ["", "[]", '{"format": 0}', '{"format": 1}', '{"format": 1, "trials": {"a": 1}}'])
def test_a_damaged_note_is_made_anew(data: Path, user_cache: Path, content: str) -> None:
    found = find_games(data, "train")
    [cache] = (user_cache / "agentsgym" / "alfworld").iterdir()
    cache.write_text(content)
    assert find_games(data, "train") == found
    assert len(json.loads(cache.read_text())["trials"]) == 4


def test_a_cache_that_cannot_be_written_is_reported_and_no_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert len(find_games(data, "train")) == 4
    assert "cannot be cached" in caplog.text


def test_missing_data_name_the_command_that_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: None
) -> None:
    with pytest.raises(ConfigError, match=r"env_config\['data'\].*does not exist.*`alfworld-download` downloads"):
        ALFWorldEnv(None, {"data": str(tmp_path / "nowhere")})
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone \(\$ALFWORLD_DATA\).*`alfworld-download`"):
        ALFWorldEnv()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"does not contain json_2.1.1/train. `alfworld-download`"):
        ALFWorldEnv.get_train_dataset({"data": str(tmp_path / "empty")})
    write_game(tmp_path / "useless", "train/x/trial", solvable=False)
    with pytest.raises(ConfigError, match=r"no playable game \(skipped: 1 not known to be solvable\)"):
        ALFWorldEnv.get_train_dataset({"data": str(tmp_path / "useless")})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"split": "validation"}, "split must be one of 'train', 'eval_in_distribution'"),
        ({"task_types": ["juggle"]}, "task_types must be a non-empty list of names from 'pick_and_place_simple'"),
        ({"task_types": ["look_at_obj_in_light"]}, "has no game with one of the task types look_at_obj_in_light"),
        ({"sise": 3}, "no option 'sise'; did you mean 'size'"),
    ],
)
def test_options_that_cannot_be(data: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ALFWorldEnv.get_train_dataset({"data": str(data)}, **options)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"reward": "dense"}, "must be one of 'success', 'progress'"),
        ({"show_commands": True}, "must be one of 'all', 'here', 'none'"),
        ({"num_processes": 0}, "a positive int"),
        ({"step_timeout_s": 0}, "a number > 0|a positive number"),
        ({"rejected_penalty": -1}, "a number >= 0"),
    ],
)
def test_configurations_that_cannot_be(data: Path, installed: None, config: dict[str, Any], sentence: str) -> None:
    for build in (ALFWorldEnv.get_train_dataset, lambda given: ALFWorldEnv(None, given)):
        with pytest.raises(ConfigError, match=sentence):
            build({"data": str(data), **config})


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (None, "must be the path of a game.tw-pddl"),
        (3, "must be the path of a game.tw-pddl"),
        ("/etc/passwd", "inside the data folder"),
        ("../secret/game.tw-pddl", "inside the data folder"),
        ("json_2.1.1/train/nothing/game.tw-pddl", "does not exist in the data folder"),
    ],
)
def test_tasks_that_cannot_be_played(data: Path, installed: None, path: Any, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        game_file(data, path)
    with pytest.raises(TaskError, match=sentence):
        ALFWorldEnv(None, {"data": str(data)}).check_task({"game": path})


def test_a_task_type_that_there_is_not(data: Path, installed: None) -> None:
    game = find_games(data, "train")[0]["game"]
    env = ALFWorldEnv(None, {"data": str(data)})
    env.check_task({"game": game, "task_type": PICK, "seed": 1})
    with pytest.raises(TaskError, match="'task_type'\\] must be one of"):
        env.check_task({"game": game, "task_type": "juggle"})


def test_an_engine_that_cannot_be_loaded_fails_the_episodes(data: Path, installed: None) -> None:
    """The worker processes find the packages that this process does; these raise."""
    report = check_env(ALFWorldEnv(None, {"data": str(data)}), max_tasks=1, raise_on=None)
    [finding] = [one for one in report.findings if one.check == "failed"]
    assert "no engine runs in these tests" in finding.text
