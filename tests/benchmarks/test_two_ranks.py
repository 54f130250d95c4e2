"""The benchmark of two ranks, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "two_ranks.py"


def test_it_prints_one_json_object_whose_gaps_are_small() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--num_steps", "2", "--num_warm_steps", "60"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["num_steps"] == 2
    assert result["turns"][0] < result["turns"][1]
    assert result["largest_loss"] > 1e-4
    assert max(result["loss_gap"], result["grad_norm_gap"]) < 1e-5
    assert result["ranks_hold_equal_weights"] is True
