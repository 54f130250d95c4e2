"""What the manual shows runs: the Python of a page from its first snippet to its last; command lines are parsed.

A snippet that cannot be run here gives the reason, in a comment before it: ``<!-- not run: it downloads a model -->``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from agentsgym.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"(?:^<!-- not run: (?P<why>.+?) -->\n+)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROMPTED = re.compile(r"^\$ (agentsgym .*)$", re.MULTILINE)

#: What these pages take for granted, as their text states: somebody has an environment, tasks, an agent and a model.
GRANTED = """
from agentsgym import GRPOEnvConfig, PolicyAgent, evaluate, tiny_policy
from agentsgym.envs import PriceListEnv
from agentsgym.envs.PriceList import RandomPlayer, ReferencePlayer

env = PriceListEnv(env_config={"goods": ["pear", "egg"], "kinds": ["price"]})
model, tokenizer = tiny_policy(env)
env = PriceListEnv(tokenizer, env.given_config)
tasks = env.tasks(3)
rows = PriceListEnv.get_train_dataset(env.given_config, size=2)
agent, expert = RandomPlayer(env), ReferencePlayer(env)
args = GRPOEnvConfig(output_dir="run", max_steps=1)
engine = object()
"""
TRAJECTORIES = "trajectories = env.rollout(tasks, PolicyAgent(model, tokenizer), max_turn_tokens=8)\n"
EVALUATIONS = """
result_before = evaluate(env, agent, tasks, num_rollouts=2, store="runs/first")
result_after = evaluate(env, expert, tasks, num_rollouts=2)
"""
POKER = """
from agentsgym import GRPOEnvConfig, tiny_policy
from agentsgym.envs.TextArena import TextArenaEnv

model, tokenizer = tiny_policy(["[check] [bet] [call] [fold]"])
rows = TextArenaEnv.get_train_dataset({"game": "KuhnPoker-v0"}, size=2)
args = GRPOEnvConfig(output_dir="run", max_steps=1, max_turn_tokens=4)
"""
TAKEN_FOR_GRANTED = {
    "agents.md": GRANTED,
    "asynchronous.md": GRANTED,
    "credit.md": GRANTED,
    "evaluation.md": GRANTED + EVALUATIONS,
    "exact_tokens.md": GRANTED + TRAJECTORIES,
    "rollout-store.md": GRANTED,
    "textarena.md": POKER,
    "training.md": GRANTED,
    "viewer.md": GRANTED + EVALUATIONS,
}
#: Pages whose snippets another test runs, to compare what they print with what the page shows.
RUN_IN = {
    "choosing-an-estimator.md": "tests/test_docs.py",
    "coming-from.md": "tests/test_docs.py",
    "contract.md": "tests/test_docs.py",
    "embedded-policy.md": "tests/training/test_pages_of_environments.py",
    "looking-at-rollouts.md": "tests/test_docs.py",
    "mixing.md": "tests/training/test_pages_of_environments.py",
    "reasoning.md": "tests/test_docs.py",
    "search.md": "tests/test_docs.py",
    "settings-that-work.md": "tests/test_docs.py",
    "tutorial.md": "tests/cli/test_tutorial.py",
    "your-environment.md": "tests/training/test_pages_of_environments.py",
}
#: Runs the pages in one process, which imports torch once; it has no file, so that a pool of processes does not run the
#: pages again in each of them. Each page has a folder and names of its own, and what goes wrong in one is its own.
RUNNER = """
import ast, json, os, sys, traceback

pages = ast.literal_eval(sys.stdin.read())
wrong = dict.fromkeys(pages, "")
for page, snippets in pages.items():
    os.makedirs(page)
    os.chdir(page)
    names = {"__name__": "__main__"}
    try:
        for index, code in snippets:
            exec(compile(code, f"{page}, snippet {index}", "exec"), names)
    except BaseException:
        wrong[page] = traceback.format_exc()
    os.chdir("..")
with open("wrong.json", "w") as file:
    json.dump(wrong, file)
"""
WITH_PYTHON = [
    page.name for page in PAGES if SNIPPET.search(page.read_text(encoding="utf-8")) and page.name not in RUN_IN
]


def snippets(page: Path) -> list[tuple[int, str]]:
    """The snippets of a page that are to be run, with their place in it, behind what the page takes for granted."""
    found = SNIPPET.finditer(page.read_text(encoding="utf-8"))
    to_run = [(index, one["code"]) for index, one in enumerate(found) if not one["why"]]
    return [(-1, TAKEN_FOR_GRANTED.get(page.name, "")), *to_run]


THE_TEST = "test_the_snippets_of_a_page_run_one_after_the_other"


@pytest.fixture(scope="module")
def wrong(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong on each requested page; "" where nothing did."""
    folder = tmp_path_factory.mktemp("snippets")
    requested = {item.name for item in request.session.items}
    steps = {page.name: snippets(page) for page in PAGES if f"{THE_TEST}[{page.name}]" in requested}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", RUNNER]
    given = repr(steps)
    ran = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=900
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads((folder / "wrong.json").read_text())


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_snippets_of_a_page_run_one_after_the_other(page: str, wrong: dict[str, str]) -> None:
    assert wrong[page] == ""


@pytest.mark.parametrize("page", RUN_IN)
def test_another_test_runs_the_snippets_of_a_page(page: str) -> None:
    assert f'"{page}"' in (ROOT / RUN_IN[page]).read_text().replace('"docs" / "', '"')


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks that call our command line, those that go on in the next line as one."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(SHELL.findall(text)).replace("\\\n", " ")
    lines = [line.strip() for line in blocks.splitlines()]
    return list(dict.fromkeys([*(line for line in lines if line.startswith("agentsgym ")), *PROMPTED.findall(text)]))


def as_a_shell_reads(line: str) -> list[str]:
    """The arguments of the command, up to a pipe, a redirection or the next command."""
    words = shlex.split(line, comments=True)[1:]
    ends = [index for index, word in enumerate(words) if re.match(r"^(\||&&|;|>|2>|<|&$)", word)]
    return words[: ends[0]] if ends else words


def parse(arguments: list[str]) -> None:
    """Let the command line read its arguments, and do nothing with them.

    Raises:
        Exception: It does not know an option, or misses an argument.
    """
    group: Any = typer.main.get_command(app)
    with contextlib.suppress(typer.Exit), group.make_context("agentsgym", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(name, rest, parent=context)  # --help exits


LINES = [pytest.param(line, id=f"{page.name}: {line}") for page in PAGES for line in commands(page)]


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_has_what_the_manual_shows(line: str) -> None:
    parse(as_a_shell_reads(line))


def test_the_manual_has_command_lines_and_a_wrong_one_is_found() -> None:
    assert len(LINES) > 20
    with pytest.raises(Exception, match="No such option"):
        parse(as_a_shell_reads("agentsgym eval TwentyQuestions --agnet random"))


def test_a_line_is_read_as_a_shell_does() -> None:
    assert as_a_shell_reads("agentsgym eval 'A B' -n 2  # twice") == ["eval", "A B", "-n", "2"]
    assert as_a_shell_reads("agentsgym envs --json | head") == ["envs", "--json"]


def test_a_snippet_that_gives_the_reason_is_not_run() -> None:
    text = "<!-- not run: it takes hours -->\n```python\na\n```\n\n```python\nb\n```\n"
    found: list[tuple[Any, str]] = [(one["why"], one["code"]) for one in SNIPPET.finditer(text)]
    assert found == [("it takes hours", "a\n"), (None, "b\n")]
