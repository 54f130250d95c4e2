"""The manual's page on TextArena names what holds, and its examples run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentsgym.envs.TextArena import catalogue, players

PAGE = (Path(__file__).parents[2] / "docs" / "textarena.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = dict(players._registered)
    yield
    players._registered.clear()
    players._registered.update(before)


def test_its_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if "GRPOEnvTrainer" not in block:  # these are run with the other pages
            exec(block, names)
    win_rate, roles = capsys.readouterr().out.splitlines()
    assert 0 <= float(win_rate) <= 1
    assert roles.startswith("[1, ")


def test_its_counts_are_those_of_the_catalogue() -> None:
    counts = Counter(entry.status for entry in catalogue().values())
    output = [int(number) for number in re.findall(r"^\| (?:works|broken).*? \| (\d+) \|", PAGE, re.MULTILINE)]
    assert output == [counts["ok"], counts["words"], counts["gamemaster"], counts["broken"]]
    assert f"each of the {len(catalogue())} games" in PAGE
    assert f"{sum(entry.min_python != '' for entry in catalogue().values())} need Python 3.12" in PAGE
