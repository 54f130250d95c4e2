"""The code of the pages on environments of one's own and on mixing runs, and prints what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["your-environment.md", "mixing.md"])
def test_a_page_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    code, shown = ("".join(re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)) for kind in ("python", "text"))
    (tmp_path / "page.py").write_text(f"import torch\ntorch.set_num_threads(1)\n{code}", encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "page.py"], capture_output=True, text=True, check=False, cwd=tmp_path, env=_environment()
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert [line for line in ran.stdout.splitlines() if not line.startswith("{")] == shown.splitlines()


def test_both_environments_have_fewer_than_forty_lines() -> None:
    page = (ROOT / "docs" / "your-environment.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    built = [block for block in blocks if "class GuessTheNumber(" in block or "class Shop(" in block]
    assert [len(block.splitlines()) < 40 for block in built] == [True, True]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
