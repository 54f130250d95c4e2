"""docs/tools.md names what holds: its snippets run, and its tables give the defaults."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.Tools.env import TOOL_FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL)


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
    for name, default in re.findall(r"^\| `(\w+)` \| `(.+?)` \| ", PAGE, re.MULTILINE):
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
