"""What each command does: the catalogue, the check, the files of a new environment, games that are played."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import GAME, ROOT, game_file, ran

from agentsgym.cli.catalogue import entries
from agentsgym.cli.options import find_env
from agentsgym.envs import PACKAGED
from agentsgym.envs.config import COMMON_FIELDS
from agentsgym.envs.TextArena import catalogue

CARELESS = GAME.replace("self.rng(session_id)", "__import__('random')")


@pytest.fixture
def game(tmp_path: Path) -> str:
    return game_file(tmp_path, "guess_of_commands")


def listed(*options: str) -> list[dict[str, Any]]:
    return ran("envs", *options, "--json").json


def test_the_list_has_groups_and_with_a_filter_their_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.dataset_rows._registered", {})  # what other tests registered
    assert {one["name"] for one in listed()} == set(PACKAGED)
    everything = listed("--all")
    assert {f"TextArena:{name}" for name in catalogue()} < {one["name"] for one in everything}
    assert len(everything) == len({one["name"] for one in everything}) == len(entries())


def test_filters_agree_with_the_catalogue() -> None:
    for_five = {name for name, one in catalogue().items() if one.min_players <= 5 <= one.max_players}
    found = {one["name"] for one in listed("--players", "5", "--text", "textarena:")}
    assert found == {"TextArena", *(f"TextArena:{name}" for name in for_five)}
    broken = {one["name"].removeprefix("TextArena:") for one in listed("--status", "broken")}
    assert broken == {name for name, one in catalogue().items() if one.status == "broken"}
    assert {one["status"] for one in listed("--offline")} == {"ok", "words"}
    assert [one["name"] for one in listed("--text", "gymnasium:taxi")] == ["Gymnasium:Taxi-v4"]
    assert ran("envs", "--status", "okay").code == 2


def test_the_catalogue_loads_no_environment() -> None:
    code = (
        "import sys\nfrom agentsgym.cli.app import app\n"
        "try:\n    app(['envs', '--all'])\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert loaded & {"torch", "transformers", "datasets", "textarena", "gymnasium", "numpy"} == set()


def test_one_environment_has_every_key_with_its_default() -> None:
    shown = ran("envs", "TextArena:Wordle-v0", "--json").json
    rows = {row["key"]: row for row in shown["env_config"]}
    assert rows["game"]["default"] == "Wordle-v0"
    assert rows["max_steps_per_episode"] == {
        "key": "max_steps_per_episode",
        "default": 100,
        "valid": "a positive int",
        "own": False,
    }
    assert rows.keys() >= COMMON_FIELDS.keys()
    assert shown["task_data"] == ["seat"]
    assert shown["game"]["status"] == "words"
    assert "keys may be" not in ran("envs", "Tools", columns=60).out
    assert ran("envs", "TextArena:Wordel-v0").code == 2


@pytest.mark.parametrize("group", PACKAGED)
@pytest.mark.parametrize("columns", [60, 80])
def test_every_environment_can_be_shown_in_any_width(group: str, columns: int) -> None:
    done = ran("envs", group, columns=columns)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= columns
    assert "max_steps_per_episode" in done.out


def test_check_reports_what_is_wrong_and_fails(tmp_path: Path, game: str) -> None:
    assert ran("check", game).code == 0
    (tmp_path / "careless_of_commands.py").write_text(CARELESS)
    done = ran("check", f"{tmp_path / 'careless_of_commands.py'}:Guess")
    assert done.code == 1
    assert "error [global-random]" in done.words
    as_json = ran("check", f"{tmp_path / 'careless_of_commands.py'}:Guess", "--json")
    assert as_json.code == 1
    assert not as_json.json["ok"]
    assert as_json.json["findings"][0]["place"].startswith(f"{tmp_path}") or as_json.json["findings"][0]["place"]


def test_check_fails_on_warnings_only_if_it_is_strict(tmp_path: Path) -> None:
    source = f"{GAME}\n    def _close_episode(self, session_id, state):\n        raise OSError('still open')\n"
    (tmp_path / "open_of_commands.py").write_text(source)
    name = str(tmp_path / "open_of_commands.py")
    assert "0 errors and 1 warnings" in ran("check", name).words
    assert (ran("check", name).code, ran("check", name, "--strict").code) == (0, 1)


@pytest.mark.parametrize(
    ("options", "more"),
    [((), []), (("--tools",), []), pytest.param(("--tools", "--mcp"), ["find_it_server.py"], marks=pytest.mark.long)],
)
def test_what_new_writes_runs(options: tuple[str, ...], more: list[str], tmp_path: Path) -> None:
    sys.modules.pop("find_it", None)  # of the case before
    done = ran("new", "FindIt", *options, "--folder", tmp_path)
    assert done.code == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(["find_it.py", "find_it.yaml", "test_find_it.py", *more])
    name = f"{tmp_path / 'find_it.py'}:FindIt"
    assert ran("check", name).code == 0
    played = ran("eval", name, "-n", "20", "-c", "max_steps_per_episode=5", "--agent", "random", "--json").json
    assert {one["agent"]: one["results"]["win_rate"] for one in played["agents"]}["reference"] == 1.0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "."]
    tested = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert tested.returncode == 0, tested.stdout
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout


def test_a_server_without_tools_is_refused(tmp_path: Path) -> None:
    done = ran("new", "FindIt", "--mcp", "--folder", tmp_path)
    assert done.code == 2
    assert "--mcp requires --tools" in done.words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("default")  # TRL is imported
def test_the_configuration_that_new_writes_can_be_trained_on(tmp_path: Path) -> None:
    assert ran("new", "find-it-again", "--folder", tmp_path).code == 0
    config = yaml.safe_load((tmp_path / "find_it_again.yaml").read_text())
    assert config.keys() == {"model", "environments", "warm_start", "training", "evaluation"}
    [part] = config["environments"]
    env = find_env(str(tmp_path / part["class"]), part["env_config"]).build()
    assert env.env_config["highest"] == 16
    settings = importlib.import_module("agentsgym").GRPOEnvConfig
    args = settings(**{**config["training"], "output_dir": str(tmp_path), "use_cpu": True})
    assert args.learning_rate == 1e-3
    assert args.max_turn_tokens == 4


def test_new_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_find_it.py").write_text("mine")
    done = ran("new", "FindIt", "--folder", tmp_path)
    assert done.code == 1
    assert "these files already exist, so nothing was written" in done.words
    assert [path.name for path in tmp_path.iterdir()] == ["test_find_it.py"]
    assert (tmp_path / "test_find_it.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "3 words", "a/b", "../x", "random", "class", "agentsgym", "ä", "a.b"])
def test_new_refuses_a_name_that_cannot_be_one(name: str, tmp_path: Path) -> None:
    assert ran("new", name, "--folder", tmp_path).code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_answer_in_another_encoding_does_not_fail_the_game(game: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text('[{"secret": 3}]')
    done = ran("play", game, "--tasks", tmp_path / "tasks.json", typed=b"\xfc\xff\n3\n")
    assert done.code == 0, done.err
    assert "won after 2 turns" in done.words


def test_a_person_wins(game: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text('[{"secret": 3}]')
    done = ran("play", game, "--tasks", tmp_path / "tasks.json", typed="1\n3\n")
    assert done.code == 0
    assert done.out.splitlines()[-2:] == ["won after 2 turns (done): reward 1", "rewards by turn: 0 1"]


def test_a_person_who_loses_is_shown_the_solution(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text('[{"solution": "whale", "seed": 1}]')
    config = ("-c", "max_steps_per_episode=2", "--tasks", tmp_path / "tasks.json")
    lost = ran("play", "TwentyQuestions", *config, typed="Is it alive?\n[cat]\n")
    assert lost.out.splitlines()[-1] == "the task was solution='whale'"
    assert "the task was" not in ran("play", "TwentyQuestions", *config, typed="[whale]\n").out


def test_a_person_uses_tools(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text('[{"goods": ["egg"], "times": 2, "prices": {"egg": 3}}]')
    tasks = ("--tasks", tmp_path / "tasks.json")
    done = ran("play", "PriceList", *tasks, typed="price('egg')\nprise('egg')\n6\n")
    assert done.code == 0
    assert "price(good): Look up what a good costs." in done.out
    assert "[result]\n3" in done.out
    assert "there is no tool 'prise'; did you mean 'price'? Please try again." in done.words
    assert "won after 2 turns" in done.words


def test_a_board_is_shown_as_it_is() -> None:
    done = ran("play", "TextArena:TicTacToe-v0", "-c", "seat=0", typed="[4]\n", columns=60)
    assert "\n 0 | 1 | 2 \n---+---+---\n 3 | 4 | 5 \n---+---+---\n 6 | 7 | 8 \n" in done.out
    assert "You left before the episode ended." in done.out
    assert done.code == 0


def test_an_agent_is_watched() -> None:
    done = ran("play", "PriceList", "--agent", "reference", "--seed", "3")
    assert done.code == 0
    assert "[answer]\nprice(good='fish')\n[result]\n2\n[answer]\n2\n" in done.out
    assert "won after 2 turns" in done.words


def test_a_game_that_fails_is_a_failure(game: str, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(["9"]))
    done = ran("play", game, "--agent", f"scripted:{tmp_path / 'script.json'}")
    assert done.code == 1
    assert "the script has only 1 actions" in done.words
