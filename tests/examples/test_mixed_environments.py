"""The example of mixed environments as a person runs it, shortened: with the embedded policy, and with a model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from example_runs import assert_refused, call_example, stop_example, summary_of

SHORT = ["--num_games", "20", "--num_demonstrations", "16", "--warm_start_steps", "4"]
DEFAULT = ["questions", "prices", "lake", "number"]
NAMES = {*DEFAULT, "sums"}
STAGES = ["random", "untrained", "imitation", "trained", "optimal"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("mixed")
    options = ["--environments", *DEFAULT, "sums", "--max_steps", "2", "--logging_steps", "2"]
    return output, call_example("mixed_environments", output, *SHORT, *options)


def test_every_environment_has_a_row_with_all_stages(run: tuple[Path, str]) -> None:
    lines = [line.split() for line in run[1].splitlines()]
    [header] = [line for line in lines if line[:1] == ["environment"]]
    assert header == ["environment", *STAGES, "%", "of", "optimal"]
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
    assert {name: len(rates) for name, rates in summary["win_rates_in_training"].items()} == dict.fromkeys(NAMES, 1)
    assert summary["interrupted"] is False
    assert (run[0] / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_it_takes_a_model_and_some_of_the_environments_and_ctrl_c_keeps_it(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    options = ["--model", str(run[0] / "model"), "--environments", "prices", "--weights", "2"]
    options += ["--per_device_train_batch_size", "8", "--max_turn_tokens", "8"]
    stop_example("mixed_environments", tmp_path, signal.SIGINT, *SHORT, *options)
    summary = summary_of(tmp_path)
    assert "imitation" not in summary
    assert summary["trained"]["num_episodes"] == 20
    assert summary["fraction_of_optimal"].keys() == {"prices"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "1", "2"), "--weights needs one number for each of the 4 environments, got 2"),
        (("--weights", "1", "1", "1", "0"), "weights['number'] must be a number above 0"),
        (("--environments", "lakes"), "--environments must be among questions, prices, lake, number, sums"),
    ],
)
def test_what_cannot_be_mixed_is_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert_refused("mixed_environments", tmp_path, [*SHORT, *options], message)
