"""Benchmarks as programs, shortened: each prints one JSON object in which every figure is there."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMUNICATION = """
import sys, pickle, tempfile, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import communication
store = dist.FileStore(tempfile.mkstemp()[1], 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
traffic, before = communication.Traffic(), dist.all_reduce
with traffic.counting():
    dist.all_reduce(torch.zeros(3))
    dist.all_gather_object([None], b"x" * 100)
    dist.barrier()
assert dist.all_reduce is before
[big, small] = traffic.rows(1)[:2]
kinds = [row["reason"].split(":")[0] for row in (big, small)]
print(kinds[0], big["bytes"], kinds[1], small["bytes"], sum(traffic.calls.values()))
dist.destroy_process_group()
rows = communication.beyond(communication.QUICK)
print([row["rollouts"] for row in rows], rows[1]["received_mb"] / rows[0]["received_mb"])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )


def result_of(name: str, *options: str) -> Any:
    """What a benchmark prints: one JSON value and nothing else, or this fails."""
    done = run(str(ROOT / "benchmarks" / f"{name}.py"), "--json", *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_command_line_is_timed() -> None:
    result = result_of("command_line", "--quick")
    assert 0 < result["interpreter_s"] < result["help_s"]
    assert result["eval_us_per_token"] > 0
    assert result["trainer_us_per_token"] > 0


def test_what_ranks_send_is_counted_and_what_more_ranks_would_send_is_unpacked() -> None:
    done = run("-c", COMMUNICATION, str(ROOT / "benchmarks"))
    assert done.returncode == 0, done.stderr[-3000:]
    counted, beyond = done.stdout.splitlines()[-2:]
    assert counted == f"object {len(pickle.dumps(b'x' * 100)) + 8} tensor 12 3"
    assert beyond.startswith("[16, 64] 4.")


@pytest.mark.parametrize("scenario", ["kills", "stores", "disks", "restarts"])
def test_no_fault_loses_anything(scenario: str) -> None:
    outcomes = result_of("faults", scenario, "--quick")
    assert outcomes
    assert all(outcome["passed"] for outcome in outcomes)


def test_an_unknown_scenario_is_refused() -> None:
    done = run(str(ROOT / "benchmarks" / "faults.py"), "floods")
    assert done.returncode == 2
    assert "unknown: floods" in done.stderr


def test_a_stored_token_takes_less_than_twelve_bytes() -> None:
    result = result_of("rollout_store", "--quick")
    assert result["cost"].keys() == result["size"].keys() == {"scripted", "embedded_policy"}
    assert all(0 < row["bytes_a_token"] < 12 for row in result["size"].values())
    assert result["opening"]["num_rollouts"] > 0


def test_all_ways_of_a_training_step_give_the_same_gradient() -> None:
    result = result_of("training_step", "--quick")
    assert [row["micro_batch"] for row in result["padding"]] == [1, 4]
    assert all(0 <= row["largest_gradient_gap"] < 1e-6 for row in result["padding"])
    assert all(0 < row["own_fraction"] < 1 for row in result["own_work"])


def test_packed_rows_save_tokens_and_give_the_same_gradient() -> None:
    result = result_of("shared_prefix", "--quick")
    for name, least in {"prompt 100": 1.5, "nothing shared": 1, "rewritten": 4, "rewritten, 8 rollouts": 4}.items():
        apart, together = result[name]["tokens"]
        assert apart >= least * together
        assert result[name].get("gradient_gap", 0.0) < 1e-5
    assert result["prompt 100"]["kept"] < 0.8


def test_a_whole_step_is_timed_with_and_without_sharing_and_by_hand() -> None:
    done = run("-m", "benchmarks.whole_step", "--quick", "--repetitions", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [{*one} for one in json.loads(done.stdout)["cpu_s"]] == [{"auto", "off", "by_hand"}]


def test_two_ranks_have_small_gaps() -> None:
    result = result_of("two_ranks", "--num_steps", "2", "--num_warm_steps", "60")
    assert result["num_steps"] == 2
    assert result["turns"][0] < result["turns"][1]
    assert result["largest_loss"] > 1e-4
    assert max(result["loss_gap"], result["grad_norm_gap"]) < 1e-5
    assert result["ranks_hold_equal_weights"] is True


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_page_is_written_opened_and_scrolled() -> None:
    (result,) = result_of("viewer", "--quick")
    assert result["rollouts"] == 16
    assert result["written"].keys() == {"write_s", "megabytes", "open_s", "longest_frame_ms", "most_rows"}
    assert result["served"]["most_rows"] == result["written"]["most_rows"] == 16
