"""The example of mixed environments as a person runs it, shortened: with the embedded policy, and with a model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "mixed_environments.py"
SHORT = ["--num_games", "20", "--num_demonstrations", "16", "--warm_start_steps", "4", "--max_steps", "4"]
NAMES = {"questions", "prices", "lake", "number", "sums"}
STAGES = ["random", "untrained", "imitation", "trained", "optimal"]


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *SHORT, "--output_dir", str(output), *options]


def summary_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("mixed")
    options = ["--logging_steps", "4"]
    done = subprocess.run(command(output, *options), capture_output=True, text=True, check=False, cwd=output)
    assert done.returncode == 0, done.stderr[-2000:]
    return output, done.stdout


def test_every_environment_has_a_row_with_all_stages(run: tuple[Path, str]) -> None:
    lines = [line.split() for line in run[1].splitlines()]
    [header] = [line for line in lines if line[:1] == ["environment"]]
    assert header == ["environment", *STAGES, "of", "optimal"]
    rows = [line for line in lines if line and line[0] in NAMES]
    assert {row[0] for row in rows} == NAMES
    assert all(len(row) == 7 for row in rows)
    assert {row[0]: row[5] for row in rows if row[0] != "number"} == dict.fromkeys(NAMES - {"number"}, "100.0%")


def test_the_summary_holds_every_environment_of_every_stage(run: tuple[Path, str]) -> None:
    summary = summary_of(run[0])
    for stage in STAGES:
        parts = summary[stage].get("by_environment", summary[stage])
        assert parts.keys() == NAMES
        assert {part["num_episodes"] for part in parts.values()} == {4}
        assert {part["num_failed"] for part in parts.values()} == {0}
    assert summary["fraction_of_optimal"].keys() == NAMES
    assert summary["interrupted"] is False
    assert (run[0] / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_it_takes_a_model_and_some_of_the_environments(run: tuple[Path, str], tmp_path: Path) -> None:
    options = ["--model", str(run[0] / "model"), "--environments", "prices", "--weights", "2", "--max_steps", "1"]
    options += ["--per_device_train_batch_size", "8", "--max_turn_tokens", "8"]
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = summary_of(tmp_path)
    assert "imitation" not in summary
    assert summary["trained"]["num_episodes"] == 20
    assert summary["fraction_of_optimal"].keys() == {"prices"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "1", "2"), "--weights needs one number for each of the 5 environments, got 2"),
        (("--weights", "1", "1", "1", "1", "0"), "weights['sums'] must be a number above 0"),
        (("--environments", "lakes"), "--environments must be some of questions, prices, lake, number, sums"),
    ],
)
def test_what_cannot_be_mixed_is_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "summary.json").exists()


def test_ctrl_c_keeps_the_policy_as_it_is(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "--environments", "prices", "--max_steps", "100000", "--logging_steps", "1"),
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
    assert summary_of(tmp_path)["interrupted"] is True
    assert (tmp_path / "model" / "model.safetensors").exists()
