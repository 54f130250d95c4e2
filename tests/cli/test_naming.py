"""Which environment a name means, and what is reported of names that mean none, or no longer any."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from command_line import GAME, ROOT, ran

import agentsgym
import agentsgym.envs
from agentsgym import ConfigError, RolloutStore, ScriptedAgent, make
from agentsgym.cli.console import UsageError
from agentsgym.cli.options import find_env
from agentsgym.cli.players import read_script
from agentsgym.envs.datasets.naming import known_names
from agentsgym.envs.players import reference_player
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.removed import REMOVED
from agentsgym.store.records import StoredRollout
from examples.waiter import WaiterEnv


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "guess_of_naming.py"
    path.write_text(GAME)
    sys.modules.pop(path.stem, None)
    return path


@pytest.mark.parametrize("name", ["TwentyQuestions", "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv"])
def test_a_group_and_a_path_name_a_class(name: str) -> None:
    assert find_env(name).env_class is TwentyQuestionsEnv


def test_a_game_is_a_key_of_the_configuration_or_of_the_dataset() -> None:
    assert find_env("TextArena:Wordle-v0", {"seat": 0}).env_config == {"game": "Wordle-v0", "seat": 0}
    assert find_env("Gymnasium:Taxi-v4").env_config == {"id": "Taxi-v4"}
    assert find_env("ReasoningEvals:chain_sum,leg_counting").dataset_options == {"task": ["chain_sum", "leg_counting"]}


def test_a_file_names_its_class(game: Path) -> None:
    named = find_env(f"{game}:Guess")
    assert named.env_class.__name__ == "Guess"
    assert find_env(str(game)).env_class is named.env_class  # the only one


@pytest.mark.parametrize("name", ["guess_of_naming", "guess_of_naming:Guess"])
def test_a_file_that_is_named_without_its_ending_is_pointed_to(
    name: str, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(game.parent)
    with pytest.raises(UsageError) as raised:
        find_env(name)
    meant = name.replace("guess_of_naming", "guess_of_naming.py")
    assert str(raised.value) == f"there is no environment {name!r}; did you mean {meant}?"
    assert find_env(meant).env_class.__name__ == "Guess"


def test_an_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint(
        "my.game", "agentsgym.envs.TwentyQuestions:TwentyQuestionsEnv", "agentsgym.envs"
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [entry])
    assert find_env("my.game").env_class is TwentyQuestionsEnv
    assert "my.game" in known_names()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TwentyQestions", "did you mean TwentyQuestions"),
        ("twentyquestions", "did you mean TwentyQuestions"),
        ("wordle-v0", "did you mean TextArena:Wordle-v0"),
        ("zzzz", "`agentsgym envs` lists the environments"),
        ("agentsgym.envs.TwentyQuestions.TwentyQuestionEnv", "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv"),
        ("no.such.module.Env", "No module named 'no'"),
        ("json.JSONDecoder", "must name a subclass of MultistepEnv"),
        ("Search:Wordle-v0", "'Search' has no variant 'Wordle-v0': use it without a colon"),
        ("nowhere/game.py:Game", "there is no file 'nowhere/game.py'"),
    ],
)
def test_a_name_that_means_nothing_is_a_usage_error_with_the_nearest(name: str, message: str) -> None:
    done = ran("check", name)
    assert done.code == 2
    assert message in done.words


def test_a_game_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="the variant is set twice"):
        find_env("TextArena:Wordle-v0", {"game": "Chess-v0"})


@pytest.mark.parametrize(
    ("source", "class_name", "message"),
    [
        (GAME, "Gues", "has no environment 'Gues'; it has Guess"),
        ("import random", "", "must contain exactly one environment, got 0"),
        (GAME + "\n\nclass Other(Guess):\n    pass\n", "", "got 2: name one as"),
        ("import nonsense_that_is_not_there", "", "line 1 raised ModuleNotFoundError: No module named"),
        ("def broken(:", "", "line 1 raised SyntaxError"),
        ("x = 1\nraise SystemExit(3)", "", "line 2 raised SystemExit: 3"),
    ],
)
def test_a_file_that_is_not_right_names_what_is_wrong(game: Path, source: str, class_name: str, message: str) -> None:
    game.write_text(source)
    with pytest.raises(UsageError) as refused:
        find_env(f"{game}:{class_name}" if class_name else str(game))
    assert message in str(refused.value)
    assert game.stem not in sys.modules or source.startswith(("\nfrom", "import random"))


def test_a_file_does_not_take_the_place_of_a_loaded_module(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(GAME)
    with pytest.raises(UsageError, match="has the same name as the loaded module 'random'"):
        find_env(f"{tmp_path / 'random.py'}:Guess")


def test_files_beside_it_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "words_of_naming.py").write_text("WORD = 'x'")
    (tmp_path / "beside_of_naming.py").write_text(f"from words_of_naming import WORD\n{GAME}")
    assert find_env(str(tmp_path / "beside_of_naming.py")).env_class.__name__ == "Guess"


def test_configuration_comes_from_options_and_files(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("objects: [clock, cat]\nmax_steps_per_episode: 2\n")
    # Two objects and two turns: with objects=all there would be longer episodes.
    arguments = ["--config-file", file, "-c", "max_steps_per_episode=1", "--dataset", "split=all", "--max-tasks", "4"]
    done = ran("check", "TwentyQuestions", "--json", *arguments).json
    assert done["ok"]
    assert done["num_turns"] == done["num_episodes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-c", "objects"], "--config must be KEY=VALUE, got 'objects'"),
        (["-c", "a=1", "-c", "a=2"], "--config sets 'a' more than once"),
        (["-c", "objekts=all"], "env_config['objekts'] is unknown; did you mean 'objects'?"),
        (["-c", "max_steps_per_episode=many"], "must be a positive int, got 'many'"),
        (["--config-file", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--tasks", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--dataset", "sise=3"], "sise"),
        (["--agent", "rando"], "unknown agent 'rando'; did you mean 'random'?"),
        (["--agent", "scripted"], "the agent must be scripted:FILE"),
        (["--agent", "random:3"], "the agent random does not accept an argument"),
        (["--agent", "scripted:nowhere.txt"], "the script nowhere.txt cannot be read"),
        (
            ["--agent", "policy:./nowhere"],
            "no model can be loaded from './nowhere' (no such folder; valid names: 'smollm2'), nor can it be a name on "
            "the Hub, such as 'Qwen/Qwen3-0.6B'",
        ),
        (["--agent", "openai:m"], "key"),
    ],
)
def test_an_option_that_is_wrong_is_a_usage_error(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    done = ran("check", "TwentyQuestions", *options)
    assert done.code == 2, done.words
    assert message in done.words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"secret": 1}, 3]', "must be a task_data dict or a dataset row, got 3"),
        ('{"secret": 1}\n{"secret":', ", line 2 is not valid JSON"),
        ("[1, 2", "is not a valid JSON list"),
        ("[]", "contains no task"),
        ('[{"sekret": 1}]', "did you mean 'secret'?"),
    ],
)
def test_tasks_of_a_file_are_checked(game: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tasks.json").write_text(text)
    done = ran("check", f"{game}:Guess", "--tasks", tmp_path / "tasks.json")
    assert done.code == 2
    assert message in done.words


def test_tasks_of_a_file_are_played(game: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"secret": 2}) for _ in range(3)))
    (tmp_path / "script.txt").write_text("1\n2\n")
    agent = f"scripted:{tmp_path / 'script.txt'}"
    done = ran("eval", f"{game}:Guess", "-a", agent, "--tasks", tmp_path / "tasks.jsonl", "--json", "--no-references")
    assert done.code == 0
    assert done.json["num_tasks"] == 3
    assert done.json["agents"][0]["results"]["win_rate"] == 1.0
    assert done.json["agents"][0]["results"]["mean_turns"] == 2.0


WAITER = "use examples/waiter.py:WaiterEnv"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["push"], "hf upload USER/NAME FOLDER"),
        (["push", "guess.py", "alice/game", "--private"], "hf upload USER/NAME FOLDER"),
        (["pull", "alice/game", "--revision", "v1"], "hf download USER/NAME --local-dir FOLDER"),
        (["audit", "--help"], "agentsgym check STORE"),
        (["audit", "runs/first", "--where", "success=true", "--json"], "agentsgym check STORE"),
    ],
)
def test_a_removed_command_names_its_successor(arguments: list[str], remedy: str) -> None:
    done = ran(*arguments)
    assert (done.code, done.out) == (2, "")
    assert remedy in done.err
    assert len(done.err.splitlines()) == 1


def test_removed_commands_are_not_listed() -> None:
    listed = {line.split()[0] for line in ran("--help").out.splitlines() if line.startswith("  ")}
    assert "check" in listed
    assert not listed & {name.partition(" ")[2] for name in REMOVED}


def test_an_option_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    done = ran("check", tmp_path, "--max-tasks", "3")
    assert (done.code, done.words) == (2, f"error: --max-tasks applies to environments, but {tmp_path} is a store")
    done = ran("check", "TwentyQuestions", "--where", "success=true")
    assert (done.code, done.words) == (2, "error: --where applies to stores, but TwentyQuestions is no folder")


@pytest.mark.parametrize("command", [("eval", "Waiter", "-a", "random"), ("envs", "WaiterEnv"), ("check", "Waiter:x")])
def test_a_removed_environment_names_its_place_on_the_command_line(command: tuple[str, ...]) -> None:
    done = ran(*command)
    assert done.code == 2
    assert WAITER in done.words


def test_a_row_of_a_removed_environment_names_its_place() -> None:
    with pytest.raises(ConfigError, match=WAITER):
        make({"env_class_path": "agentsgym.envs.Waiter.WaiterEnv"})


def test_imports_of_what_was_removed_name_its_place() -> None:
    with pytest.raises(ImportError, match=WAITER):
        _ = agentsgym.envs.WaiterEnv
    with pytest.raises(ImportError, match=WAITER):
        from agentsgym.envs import WaiterEnv  # noqa: F401, PLC0415
    with pytest.raises(ModuleNotFoundError, match=WAITER):
        importlib.import_module("agentsgym.envs.Waiter")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'agentsgym.envs.Writer'$"):
        importlib.import_module("agentsgym.envs.Writer")
    with pytest.raises(AttributeError, match="has no attribute 'WriterEnv'"):
        _ = agentsgym.WriterEnv


def test_a_store_of_a_removed_environment_is_read_and_only_replay_needs_its_class(tmp_path: Path) -> None:
    env, store = WaiterEnv(), tmp_path / "store"
    tasks = env.tasks(2)
    played = {
        "reference": env.rollout(tasks, reference_player(env)),
        "tea": env.rollout(tasks, ScriptedAgent(["tea"], repeat_last=True)),
    }
    with RolloutStore.writer(store) as writer:
        for agent, trajectories in played.items():
            for trajectory in trajectories:
                path = "agentsgym.envs.Waiter.WaiterEnv"
                record = StoredRollout(
                    trajectory=trajectory, agent=agent, env_class_path=path, env_config=dict(env.env_config)
                )
                writer.add_record(record)
    assert len(RolloutStore(store).filter(agent="tea")) == 2
    checked = ran("check", store, "--where", "agent=reference")
    assert (checked.code, "WaiterEnv is not a known environment" in checked.words) == (0, True)
    compared = ran("compare", store, "--where-a", "agent=tea", "--where-b", "agent=reference")
    assert (compared.code, "2 shared tasks" in compared.words) == (0, True)
    assert ran("view", store, "--out", tmp_path / "page.html").code == 0
    assert "Anna orders" in str(RolloutStore(store).record(0).trajectory._repr_html_())
    replayed = ran("replay", store)
    assert (replayed.code, WAITER in replayed.words) == (1, True)
    again = ran("replay", store, "--env", f"{ROOT / 'examples' / 'waiter.py'}:WaiterEnv")
    assert (again.code, "4 same, 0 different" in again.words) == (0, True)


def test_a_script_of_deep_json_is_an_action(tmp_path: Path) -> None:
    deep = "[" * 100_000
    (tmp_path / "script.json").write_text(deep)
    assert read_script(tmp_path / "script.json") == [deep]
