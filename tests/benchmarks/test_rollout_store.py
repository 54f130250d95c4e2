"""The benchmark of the store runs, and a token takes no more room than is promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_token_takes_less_than_twelve_bytes_and_every_figure_is_there() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout_store.py"), "--quick", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    result = json.loads(ran.stdout)
    assert result["cost"].keys() == result["size"].keys() == {"scripted", "embedded_policy"}
    assert all(0 < row["bytes_a_token"] < 12 for row in result["size"].values())
    assert result["opening"]["num_rollouts"] > 0
