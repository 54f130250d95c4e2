"""The example that learns to call tools, shortened: what it prints and leaves behind, and a model of one's own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from example_runs import call_example, stop_example, summary_of

SHORT = ["--num_tasks", "30", "--num_demonstrations", "60", "--warm_start_steps", "4", "--num_train_tasks", "40"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("tools")
    return output, call_example("tools", output, *SHORT, "--max_steps", "4", "--logging_steps", "4")


def test_it_compares_the_policy_with_random_and_optimal_play(run: tuple[Path, str]) -> None:
    output, printed = run
    players = ["random", "optimal", "untrained", "before", "after"]
    assert [
        line.split()[0] for line in printed.splitlines() if line.split()[:1] and line.split()[0] in players
    ] == players
    summary = summary_of(output)
    assert summary["optimal"]["mean_reward"] == 1.0
    assert 0 <= summary["fraction_of_optimal"] <= 1
    assert summary["after"]["num_episodes"] == 30
    assert summary["interrupted"] is False
    assert {"warm start", "reinforcement learning", "after"} <= set(summary["seconds"])
    assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "transcripts_after.txt").read_text(encoding="utf-8").count("=== task ") == 30


def test_it_takes_a_model_of_ones_own_and_ctrl_c_keeps_it_as_it_is(run: tuple[Path, str], tmp_path: Path) -> None:
    options = ["--model", str(run[0] / "model"), "--per_device_train_batch_size", "8", "--num_generations", "4"]
    options += ["--max_turn_tokens", "8", "--kinds", "price"]
    printed = stop_example("tools", tmp_path, signal.SIGINT, *SHORT, *options)
    summary = summary_of(tmp_path)
    assert "warm start" not in summary["seconds"]
    assert summary["env_config"] == {"kinds": ["price"], "max_price": 9, "max_steps_per_episode": 6}
    assert "after" in printed
