"""The benchmarks of the loop, bare and with a model: two loops that keep the same record, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


def output_of(name: str, *options: str) -> str:
    script = ROOT / "benchmarks" / f"{name}.py"
    command = [sys.executable, str(script), "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(output_of("rollout_overhead", "--json"))  # one JSON object and nothing else, or this fails


def test_both_loops_keep_the_same_record(result: dict[str, Any]) -> None:
    assert result["same_record"] is True


def test_every_way_to_play_keeps_the_same_record(result: dict[str, Any]) -> None:
    modes = {name: row for name, row in result["modes"].items() if isinstance(row, dict)}
    assert {"async", "threads", "processes"} <= modes.keys()
    for row in modes.values():
        assert row["same_record"] is True
        assert min(row["rollout_us_a_turn"], row["ratio"]) > 0


def test_the_tokenizer_has_a_vocabulary_of_a_real_size(result: dict[str, Any]) -> None:
    assert 32_000 <= result["vocabulary_size"] <= 32_010


def test_both_lengths_play_the_same_number_of_turns(result: dict[str, Any]) -> None:
    short, long = result["loop"], result["long"]
    assert short["num_episodes"] * short["num_turns"] == long["num_episodes"] * long["num_turns"]
    for row in (short, long):
        assert min(row["bare_us_a_turn"], row["rollout_us_a_turn"], row["ratio"]) > 0


def test_the_agent_is_called_for_all_episodes_at_once_and_all_finish(result: dict[str, Any]) -> None:
    row = result["concurrent"]
    assert row["num_live"] == row["num_finished"] == row["num_episodes"]


def test_a_turn_among_sixteen_times_the_episodes_is_compared(result: dict[str, Any]) -> None:
    row = result["crowd"]
    assert row["num_episodes"] == 16 * row["few_episodes"]
    assert min(row["few_us_a_turn"], row["rollout_us_a_turn"], row["growth"]) > 0


def test_four_times_the_turns_are_four_times_the_tokens_and_no_more_memory_a_token(result: dict[str, Any]) -> None:
    short, long = result["memory"]
    assert long["num_turns"] == 4 * short["num_turns"]
    # The template's tokens around an observation; the very first lacks the line break in front.
    assert long["num_tokens"] + long["num_episodes"] == 4 * (short["num_tokens"] + short["num_episodes"])
    assert long["bytes_a_token"] < 1.2 * short["bytes_a_token"]


def test_without_json_it_prints_a_table() -> None:
    assert output_of("rollout_overhead").startswith("episodes x turns   bare us/turn   rollout us/turn   ratio\n")


def test_the_ratios_are_recorded_with_their_intervals(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rollout_overhead", "--quick", "--record", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    result = json.loads((tmp_path / "rollout_overhead.json").read_text(encoding="utf-8"))
    assert result["figures"].keys() == {"loop_ratio", "long_ratio"}
    assert result["fingerprint"] is None
    assert "-m benchmarks.rollout_overhead --quick --record" in result["command"]


@pytest.fixture(scope="module")
def with_model() -> dict[str, Any]:
    return json.loads(output_of("rollout_transformers", "--json"))


def test_both_loops_play_the_same(with_model: dict[str, Any]) -> None:
    assert with_model["greedy_identical"] is True


def test_every_size_has_its_times_and_ratios(with_model: dict[str, Any]) -> None:
    for row in with_model["compared"]:
        assert row["greedy_identical"] is True
        assert min(row["generate_s"], row["agent_s"], row["ratio"]) > 0
        assert row["ratio"] == row["ratio_by_turns"][str(row["num_turns"])]
        assert {"hidden_size", "num_layers", "num_episodes", "num_repeats"} <= row.keys()


def test_long_episodes_have_a_rate_for_each_turn(with_model: dict[str, Any]) -> None:
    for row in with_model["long"]:
        assert len(row["tokens_a_second"]) == row["num_turns"]
        assert min(row["tokens_a_second"]) > 0


def test_rates_are_set_beside_those_of_the_bare_model(with_model: dict[str, Any]) -> None:
    for row in with_model["long"]:
        contexts = {turn: bare["context_tokens"] for turn, bare in row["bare_by_turn"].items()}
        assert contexts == {"1": 0, "16": 15 * (31 + 8)}
        for turn, bare in row["bare_by_turn"].items():
            seconds = (bare["chunk_ms"] + 7 * bare["token_ms"]) / 1000
            assert bare["tokens_a_second"] == pytest.approx(row["num_episodes"] * 8 / seconds, rel=0.05)
            rate = row["tokens_a_second"][int(turn) - 1]
            assert bare["share_of_bare"] == pytest.approx(rate / bare["tokens_a_second"], abs=0.006, rel=0.01)


def test_with_a_model_it_prints_a_table_as_well() -> None:
    lines = output_of("rollout_transformers").splitlines()
    assert lines[0] == "hidden x layers   episodes x turns   generate s   agent s   ratio   ratio by turns"
    assert lines[-1] == "greedy tokens are identical"
