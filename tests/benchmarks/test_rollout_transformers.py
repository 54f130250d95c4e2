"""The benchmark of rollouts with a model runs, compares two loops that answer the same, and prints what it states."""

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


def test_both_loops_play_the_same(result: dict[str, Any]) -> None:
    assert result["greedy_identical"] is True


def test_every_size_has_its_times_and_ratios(result: dict[str, Any]) -> None:
    for row in result["compared"]:
        assert row["greedy_identical"] is True
        assert min(row["generate_s"], row["agent_s"], row["ratio"]) > 0
        assert row["ratio"] == row["ratio_by_turns"][str(row["num_turns"])]
        assert {"hidden_size", "num_layers", "num_episodes", "num_repeats"} <= row.keys()


def test_long_episodes_have_a_rate_for_each_turn(result: dict[str, Any]) -> None:
    for row in result["long"]:
        assert len(row["tokens_a_second"]) == row["num_turns"]
        assert min(row["tokens_a_second"]) > 0


def test_rates_are_set_beside_those_of_the_bare_model(result: dict[str, Any]) -> None:
    for row in result["long"]:
        contexts = {turn: bare["context_tokens"] for turn, bare in row["bare_by_turn"].items()}
        assert contexts == {"1": 0, "16": 15 * (31 + 8)}
        for turn, bare in row["bare_by_turn"].items():
            seconds = (bare["chunk_ms"] + 7 * bare["token_ms"]) / 1000
            assert bare["tokens_a_second"] == pytest.approx(row["num_episodes"] * 8 / seconds, rel=0.05)
            rate = row["tokens_a_second"][int(turn) - 1]
            assert bare["share_of_bare"] == pytest.approx(rate / bare["tokens_a_second"], abs=0.006, rel=0.01)


def test_without_json_it_prints_a_table() -> None:
    lines = output_of().splitlines()
    assert lines[0] == "hidden x layers   episodes x turns   generate s   agent s   ratio   ratio by turns"
    assert lines[-1] == "greedy tokens are identical"
