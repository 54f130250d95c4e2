"""The page of the store: its snippets run one after another, and its table has every column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentsgym import RolloutStore, ScriptedAgent
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.store.schema import SCHEMA

PAGE = (Path(__file__).parents[2] / "docs" / "rollout-store.md").read_text()


def test_the_snippets_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "env": TwentyQuestionsEnv(env_config={"max_steps_per_episode": 3}),
        "agent": ScriptedAgent(["Is it an animal?", "Is it a dog?"], repeat_last=True),
        "tasks": [{"solution": "dog"}, {"solution": "clock"}],
    }
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "rollout-store.md", "exec"), names)
    assert len(RolloutStore("runs/first")) == 8  # the second call played nothing
    assert len(names["won"]) == 4
    assert names["record"].agent == "scripted"
    assert names["table"].num_rows == len(names["frame"]) == 8
    assert "8 rollouts" in RolloutStore("runs/first")._repr_html_()  # what a notebook shows
    assert RolloutStore("runs/mine").record(0).extra == {"note": "looked at"}


def test_every_column_is_in_the_table() -> None:
    section = PAGE.partition("## The columns")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {*SCHEMA.names}
