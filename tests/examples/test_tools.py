"""The example that learns to call tools, shortened: what it prints and leaves behind, and a model of one's own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["--num_tasks", "30", "--num_demonstrations", "60", "--warm_start_steps", "4", "--num_train_tasks", "40"]


def command(output: Path, *options: str) -> list[str]:
    script = ROOT / "examples" / "tools.py"
    short = [*SHORT, "--max_steps", "4", "--logging_steps", "4"]
    return [sys.executable, str(script), *short, "--output_dir", str(output), *options]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("tools")
    done = subprocess.run(command(output), capture_output=True, text=True, check=True, cwd=output)
    return output, done.stdout


def test_it_compares_the_policy_with_random_and_optimal_play(run: tuple[Path, str]) -> None:
    output, printed = run
    players = ["random", "optimal", "untrained", "before", "after"]
    assert [
        line.split()[0] for line in printed.splitlines() if line.split()[:1] and line.split()[0] in players
    ] == players
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert summary["optimal"]["mean_reward"] == 1.0
    assert 0 <= summary["fraction_of_optimal"] <= 1
    assert summary["after"]["num_episodes"] == 30
    assert {"warm start", "reinforcement learning", "after"} <= set(summary["seconds"])
    assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "transcripts_after.txt").read_text(encoding="utf-8").count("=== task ") == 30


def test_it_takes_a_model_of_ones_own(run: tuple[Path, str], tmp_path: Path) -> None:
    options = ["--model", str(run[0] / "model"), "--per_device_train_batch_size", "8", "--num_generations", "4"]
    options += ["--max_turn_tokens", "8", "--max_steps", "1", "--kinds", "price"]
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, check=True, cwd=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert "warm start" not in summary["seconds"]
    assert summary["env_config"] == {"kinds": ["price"], "max_price": 9, "max_steps_per_episode": 6}
    assert "after" in done.stdout


def test_ctrl_c_keeps_the_policy_as_it_is(tmp_path: Path) -> None:
    arguments = [*command(tmp_path, "--max_steps", "100000", "--kinds", "price"), "--logging_steps", "1"]
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests themselves run in the background, SIGINT is ignored, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stderr is not None
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    for line in process.stderr:  # tqdm's carriage returns count as line ends
        if "win rate" in line:
            process.send_signal(signal.SIGINT)
            break
    output, _ = process.communicate()
    watchdog.cancel()
    assert process.returncode == 0, output
    assert "keeping the policy as it is now" in output
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["interrupted"] is True
    assert (tmp_path / "model" / "model.safetensors").exists()
