"""The command as a whole: quick, in any terminal, with exit codes, silent about controls; and its page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import GAME, ROOT, ran, shell
from typer.testing import CliRunner

import agentsgym
from agentsgym.cli.app import app
from agentsgym.recipes.recipe import EnvironmentPart, EvaluationPart, Recipe, WarmStart

COMMANDS = ("envs", "check", "new", "eval", "play")
HEAVY = {
    "huggingface_hub",
    "torch",
    "transformers",
    "trl",
    "numpy",
    "datasets",
    "rich",
    "openai",
    "textarena",
    "gymnasium",
    "yaml",
}
HOSTILE = """
from agentsgym import MultistepEnv

SAID = "\\x1b[31mred\\x1b[0m [red]markup[/red] :smile: \\u202eabc\\u200f \\x9b2J " + "x" * 1_000_000


class Hostile(MultistepEnv):
    "\\x1b[31mIts first line.\\x1b[0m [red]"

    def _initialize_episode(self, session_id, task_data):
        return {"done": False}

    def _format_prompt(self, state, step):
        return SAID if step == 0 else "Again."

    def _step_episode(self, session_id, state, action):
        if action == "fail":
            raise ValueError(SAID)
        return state, 0.0, action == "end", {"success": action == "end"}
"""
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def hostile(folder: Path) -> str:
    (folder / "hostile_game.py").write_text(HOSTILE)
    sys.modules.pop("hostile_game", None)
    return f"{folder / 'hostile_game.py'}:Hostile"


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=lambda one: one[0])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom agentsgym.cli.app import app\n"
        f"try:\n    app({arguments!r}, prog_name='agentsgym')\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    output, loaded = done.stdout.split("LOADED")
    assert "Usage: agentsgym" in output
    assert set(loaded.split()) & HEAVY == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_narrow_terminal(name: str) -> None:
    help_text = ran(name, "--help", columns=60).out
    assert max(map(len, help_text.splitlines())) <= 60
    assert not OBEYED.search(help_text.replace("\n", ""))


def test_the_version_and_no_command() -> None:
    assert ran("--version").out.strip() == agentsgym.__version__
    assert "Commands:" in ran().words


def test_a_slip_of_the_pen_is_a_usage_error() -> None:
    assert ran("evaluate").code == 2
    assert ran("eval").code == 2
    assert ran("eval", "TwentyQuestions", "--num-tasks", "0").code == 2


def test_completion_offers_environments_and_agents() -> None:
    def offered(words: str) -> set[str]:
        variables = {"_AGENTSGYM_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}
        done = CliRunner().invoke(app, [], env=variables, prog_name="agentsgym")
        return set(re.findall(r"[\w:-]+", done.stdout.replace("\\", "")))

    assert {"TwentyQuestions", "TextArena"} <= offered("agentsgym eval T")
    assert "TextArena:Wordle-v0" in offered("agentsgym eval TextArena:Wor")
    assert {"random", "reference"} <= offered("agentsgym eval TwentyQuestions --agent r")
    assert "train" in offered("agentsgym eval TwentyQuestions --split t")
    assert "broken" in offered("agentsgym envs --status b")
    assert "kto" in offered("agentsgym export runs --to k")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_games_behind_a_colon(tmp_path: Path) -> None:
    command = tmp_path / "agentsgym"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m agentsgym.cli.app "$@"\n')
    command.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def bash(script: str, **more: str) -> list[str]:
        run = ["bash", "--norc", "-c", script]
        return subprocess.run(run, env=variables | more, capture_output=True, text=True, check=True).stdout.splitlines()

    completion = "\n".join(bash("agentsgym", _AGENTSGYM_COMPLETE="source_bash"))

    def offered(*words: str) -> list[str]:  # as bash splits what was typed
        given = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}) COMP_CWORD={len(words) - 1}"
        return bash(f"{completion}\n{given}\n_agentsgym_completion agentsgym\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"")

    assert offered("agentsgym", "eval", "TextArena", ":", "Wordle-v0-h") == ["Wordle-v0-hardcore"]
    assert "FrozenLake-v1" in offered("agentsgym", "eval", "Gymnasium", ":")
    assert offered("agentsgym", "eval", "TextArena", ":", "Wordle-v0", "--agent", "ran") == ["random"]
    assert offered("agentsgym", "eval", "TextArena:Wordle-v0-h") == ["TextArena:Wordle-v0-hardcore"]  # not split


@pytest.mark.parametrize("command", [("envs",), ("check",), ("play",), ("eval", "--agent", "random"), ("play", "-a")])
def test_what_an_environment_returns_is_inert(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = command
    (tmp_path / "script.txt").write_text("\x1b[2Jfirst\u202e\nfail")
    if options == ["-a"]:
        options = ["-a", f"scripted:{tmp_path / 'script.txt'}"]
    done = ran(name, hostile(tmp_path), *options, typed="hello\nfail\n", columns=60)
    printed = done.out + done.err
    assert not OBEYED.search(printed.replace("\n", ""))
    assert len(printed) < 100_000
    if name in ("play", "envs"):
        assert "\\x1b[31m" in printed
        assert "[red]" in printed
    if name == "play":
        assert "\\u202eabc\\u200f" in printed
        assert ":smile:" in printed
        assert "characters are omitted" in done.words


def test_a_real_process_plays_and_ends_at_the_end_of_its_input(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(GAME)
    process = shell("play", "guess.py", "--seed", "1", cwd=tmp_path)
    out, err = process.communicate("9\n", timeout=60)
    assert process.returncode == 0, err
    assert "You left before the episode ended." in out
    assert "Traceback" not in err


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_has_seen_enough_is_no_error(options: tuple[str, ...]) -> None:
    process = shell("envs", "--all", *options)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 1
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.stdin is not None
    process.stdin.close()


def test_a_terminal_that_knows_only_ascii_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(GAME.replace("Guess: 1 to 4.", "Räts 字 …"))
    process = shell("play", "guess.py", cwd=tmp_path, PYTHONIOENCODING="ascii")
    out, err = process.communicate("9\n", timeout=60)
    assert process.returncode == 0, err
    assert "R\\xe4ts \\u5b57" in out


PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)
OPTIONS: dict[str, set[str]] = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in GROUP.commands.items()
}
SECTIONS = {section.split("\n", 1)[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def test_every_command_has_a_section_and_a_row_in_the_overview() -> None:
    assert {name for name in SECTIONS if name.islower()} == set(OPTIONS)  # other headings begin with a capital
    assert set(re.findall(r"\[`(\w+)`\]\(#\w+\)", PAGE.split("\n## ", 1)[0])) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_section_has_an_example_and_names_options_of_its_command_alone(name: str) -> None:
    section = SECTIONS[name]
    assert re.search(rf"^(?:\$ )?agentsgym {name} ", section, re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section)) <= OPTIONS[name]


def test_the_other_sections_name_options_that_exist() -> None:
    known = {option for options in OPTIONS.values() for option in options} | {"--help", "--install-completion"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) <= known


def test_every_key_of_a_configuration_has_a_row() -> None:
    rows = re.findall(r"^\| (`[\w.]+`(?:, `\w+`)*) \| ", SECTIONS["train"], re.MULTILINE)
    documented = {
        f"{first.rpartition('.')[0]}.{key.rpartition('.')[2]}".lstrip(".")
        for first, keys in ((names[0], names) for names in (re.findall(r"`([\w.]+)`", row) for row in rows))
        for key in keys
    }
    parts = {"environments": EnvironmentPart, "warm_start": WarmStart, "evaluation": EvaluationPart}
    nested = {f"{name}.{field.name.rstrip('_')}" for name, part in parts.items() for field in fields(part)}
    top = {field.name for field in fields(Recipe)} - {"folder", "name", "warm_start", "evaluation"}
    assert documented == nested | top
