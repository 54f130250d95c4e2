"""The example of a stock trainer runs, whichever way it hands TRL its credit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("credit", ["final", "turn"])
def test_it_warms_up_trains_and_plays(credit: str) -> None:
    options = ["--credit", credit, "--steps", "2", "--warm-up", "2", "--tasks", "32"]
    command = [sys.executable, "examples/stock_trl.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    *_, before, after = ran.stdout.splitlines()
    assert [line.split()[0] for line in (before, after)] == ["before", "after"]
