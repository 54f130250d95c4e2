"""The benchmark of a training step, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training_step.py"


def test_it_prints_one_json_object_and_all_ways_give_the_same_gradient() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--quick"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["micro_batch"] for row in result["padding"]] == [1, 4]
    assert all(0 <= row["largest_gradient_gap"] < 1e-6 for row in result["padding"])
    assert all(0 < row["own_fraction"] < 1 for row in result["own_work"])
