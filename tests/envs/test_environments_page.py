"""The pages on environments, tools and TextArena name what holds: snippets run, tables give the defaults."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.TextArena import catalogue
from agentsgym.envs.Tools.env import TOOL_FIELDS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "environments.md").read_text(encoding="utf-8")
TOOLS = (DOCS / "tools.md").read_text(encoding="utf-8")
TEXTARENA = (DOCS / "textarena.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", TOOLS, re.MULTILINE | re.DOTALL)


def test_what_run_trial_and_generate_give_is_as_the_page_shows_it() -> None:
    code, _, after = PAGE.partition("One rollout of two turns, both ways:\n\n```python\n")[2].partition(
        "```\n\n```text\n"
    )
    shown = after.partition("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "page"})
    assert printed.getvalue() == shown


@pytest.mark.parametrize(("code", "printed"), BLOCKS)
def test_a_snippet_prints_what_the_page_shows(
    code: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "snippet.py").write_text(code, encoding="utf-8")  # a schema is made of a function's source file
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "snippet", raising=False)  # of the snippet before
    names = vars(importlib.import_module("snippet"))
    assert capsys.readouterr().out == printed
    if "rows" in names:
        assert sorted(row["task_data"]["answer"] for row in names["rows"]) == [8, 10]


def test_every_key_is_documented_with_its_default() -> None:
    page: dict[str, Any] = {}
    for name, default in re.findall(r"^\| `(\w+)` \| `(.+?)` \| ", TOOLS, re.MULTILINE):
        with contextlib.suppress(ValueError, SyntaxError):
            page.setdefault(name, ast.literal_eval(default))
    assert {name: page.get(name, "missing") for name in TOOL_FIELDS} == {
        name: field.default for name, field in TOOL_FIELDS.items()
    }


def test_the_defaults_of_the_price_list_are_those_of_the_page() -> None:
    config = PriceListEnv().env_config
    assert (config["kinds"], config["max_price"]) == (["price", "sum", "product"], 9)
    assert (len(config["goods"]), config["max_steps_per_episode"], config["tool_timeout_s"]) == (8, 6, None)
    assert PriceListEnv().max_answer == 36


def test_its_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXTARENA, re.MULTILINE | re.DOTALL):
        if "GRPOEnvTrainer" not in block:  # these are run with the other pages
            exec(block, names)
    win_rate, roles = capsys.readouterr().out.splitlines()
    assert 0 <= float(win_rate) <= 1
    assert roles.startswith("[1, ")


def test_its_counts_are_those_of_the_catalogue() -> None:
    counts = Counter(entry.status for entry in catalogue().values())
    output = [int(number) for number in re.findall(r"^\| (?:works|broken).*? \| (\d+) \|", TEXTARENA, re.MULTILINE)]
    assert output == [counts["ok"], counts["words"], counts["gamemaster"], counts["broken"]]
    assert f"each of the {len(catalogue())} games" in TEXTARENA
    assert f"{sum(entry.min_python != '' for entry in catalogue().values())} need Python 3.12" in TEXTARENA
