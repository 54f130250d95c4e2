"""The benchmark of the command line, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "command_line.py"


def test_it_prints_one_json_object() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--quick"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 < result["interpreter_s"] < result["help_s"]
    assert result["eval_us_per_token"] > 0
    assert result["trainer_us_per_token"] > 0
