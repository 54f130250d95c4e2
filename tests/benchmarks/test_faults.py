"""The benchmark of faults, shortened: what is killed, runs out of room or is started again ends as if it had not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.parametrize("scenario", ["kills", "stores", "disks", "restarts"])
def test_nothing_is_lost(scenario: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    assert outcomes
    assert all(outcome["passed"] for outcome in outcomes)


def test_an_unknown_scenario_is_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "floods"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown: floods" in done.stderr
