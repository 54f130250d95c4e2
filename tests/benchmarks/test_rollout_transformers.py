"""The benchmark of rollouts with a model runs, compares two loops that say the same, and prints what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def output_of(*options: str) -> str:
    script = ROOT / "benchmarks" / "rollout_transformers.py"
    command = [sys.executable, str(script), "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(output_of("--json"))  # one JSON object and nothing else, or this fails


def test_both_loops_say_the_same(result: dict[str, Any]) -> None:
    assert result["greedy_identical"] is True


def test_every_size_has_its_times_and_ratios(result: dict[str, Any]) -> None:
    for row in result["compared"]:
        assert row["greedy_identical"] is True
        assert min(row["generate_s"], row["agent_s"], row["ratio"]) > 0
        assert row["ratio"] == row["ratio_by_turns"][str(row["num_turns"])]
        assert {"hidden_size", "num_layers", "num_episodes", "num_repeats"} <= row.keys()


def test_long_episodes_have_a_rate_for_each_turn(result: dict[str, Any]) -> None:
    row = result["long"]
    assert len(row["tokens_a_second"]) == row["num_turns"]
    assert min(row["tokens_a_second"]) > 0


def test_without_json_it_prints_a_table() -> None:
    lines = output_of().splitlines()
    assert lines[0] == "hidden x layers   episodes x turns   generate s   agent s   ratio   ratio by turns"
    assert lines[-1] == "greedy tokens are identical"
