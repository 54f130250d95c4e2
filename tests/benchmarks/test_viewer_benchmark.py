"""The benchmark of the viewer runs, and every figure is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_page_is_written_opened_and_scrolled() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "viewer.py"), "--quick", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    (result,) = json.loads(ran.stdout)
    assert result["rollouts"] == 16
    assert result["written"].keys() == {"write_s", "megabytes", "open_s", "longest_frame_ms", "most_rows"}
    assert result["served"]["most_rows"] == result["written"]["most_rows"] == 16
