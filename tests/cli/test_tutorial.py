"""The tutorial's commands and code run in an empty folder, in the order of the page."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, ran

pytestmark = pytest.mark.filterwarnings("default")  # TRL trains

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
SHORT = (
    *("training.max_steps=1", "training.use_cpu=true", "warm_start.settings.use_cpu=true"),
    *("warm_start.num_episodes=8", "warm_start.max_steps=2", "evaluation.num_tasks=5"),
)
WANTED = {"new", "check", "play", "eval", "train", "compare", "view"}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("guess_the_number", None)  # of the test before


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    output: set[str] = set()
    for kind, block in re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if kind == "python":
            exec(compile(block, "tutorial.md", "exec"), names)
            continue
        for line in block.splitlines():
            if line.startswith("agentsgym "):
                output.add(line.split()[1])
                _run(shlex.split(line)[1:])
    assert output == WANTED
    printed = capsys.readouterr().out
    assert "250 rollouts; " in printed
    assert "return_to_go [[" in printed
    assert printed.splitlines()[-1].startswith(("2 ", "3 "))  # the table of the turns
    assert "after" in Path("page.html").read_text(encoding="utf-8")


def _run(words: list[str]) -> None:
    more: list[str] = []
    if words[0] == "train":
        more = [part for setting in SHORT for part in ("--set", setting)]
    elif words[0] == "view":
        more = ["--out", "page.html"]  # the page in a file: served, it stays until Ctrl-C
    done = ran(*words, *more, typed="8\n4\n2\n1\n" if words[0] == "play" else "")
    assert done.code == 0, (words, done.err)


def test_what_the_tutorial_states_of_the_game_is_so() -> None:
    assert ran("new", "GuessTheNumber").code == 0
    done = ran("eval", "guess_the_number.py", "--agent", "random", "-n", "50", "-k", "4")
    shown = re.search(r"--store runs/first\n```\n\n```text\n(.*?)…", PAGE, re.DOTALL)
    assert shown is not None
    assert [line.split() for line in done.out.splitlines()[:4]] == [one.split() for one in shown[1].splitlines()]
