"""The benchmark of rollouts at their own pace plays what it has planned, in every way that it compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_way_plays_the_plan_and_is_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.continuous_vllm", "--json", "--episodes", "3", "--draws", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = json.loads(ran.stdout.splitlines()[-1])["rows"]
    assert [row["wait_s"] for row in rows] == [0.001, 0.1, 0.5]
    assert rows[2]["continuous_s"] > rows[0]["continuous_s"]
