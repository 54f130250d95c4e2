"""The examples of mixed environments, a stock trainer, self-play and tools as a person runs them, shortened."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import FOLDER, assert_refused, call_example, stop_example, summary_of

from agentsgym.envs.TextArena import TextArenaEnv

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


ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("credit", ["final", "turn"])
def test_it_warms_up_trains_and_plays(credit: str) -> None:
    options = ["--credit", credit, "--steps", "2", "--warm-up", "2", "--tasks", "32"]
    command = [sys.executable, "examples/stock_trl.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    *_, before, after = ran.stdout.splitlines()
    assert [line.split()[0] for line in (before, after)] == ["before", "after"]


SHORT_SELFPLAY = ["--num_games", "8", "--num_demonstrations", "32", "--warm_start_steps", "3"]
SHORT_SELFPLAY += ["--per_device_train_batch_size", "16", "--num_generations", "4"]


@pytest.fixture(scope="module")
def selfplay_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("selfplay")
    return output, call_example("tictactoe_selfplay", output, *SHORT_SELFPLAY, "--max_steps", "2")


def test_both_seats_are_rated_against_random_and_optimal_play(selfplay_run: tuple[Path, str]) -> None:
    output, printed = selfplay_run
    rows = {line.split()[0]: line for line in printed.splitlines() if line.count(" / ") == 8}
    assert list(rows) == ["random", "optimal", "before", "after"]
    assert "58.5 / 12.7 / 28.8  28.8 / 12.7 / 58.5" in rows["random"]
    assert "99.5 / 0.5 / 0.0    93.2 / 6.0 / 0.7  0.0 / 100.0 / 0.0  0.0 / 100.0 / 0.0" in rows["optimal"]
    summary = summary_of(output)
    ratings = ["O against random", "X against random", "O against optimal", "X against optimal"]
    for when in ("before", "after"):
        assert list(summary["ratings"][when]) == ratings
        assert all(one["num_episodes"] == 8 and one["num_failed"] == 0 for one in summary["ratings"][when].values())
        assert (output / f"transcripts_{when}.txt").read_text(encoding="utf-8").count("=== task ") == 32
        assert summary["fraction_of_optimal"][when] <= 1.5
    assert summary["env_config"]["opponent"] == "self"
    assert summary["interrupted"] is False


def test_what_it_imitates_is_legal_and_shown_as_lines() -> None:
    example = runpy.run_path(str(FOLDER / "tictactoe_selfplay.py"))
    config = {"game": "TicTacToe-v0", "opponent": "self", "history": example["board_as_lines"]}
    games = TextArenaEnv(env_config=config).rollout([{"seed": seed} for seed in range(20)], example["RandomMover"](0))
    assert not any(turn.invalid for game in games for turn in game.turns)
    board = (
        "Current Board:\n\n 0 | O | 2 \n---+---+---\n 3 | 4 | 5 \n---+---+---\n X | 7 | O \n\nAvailable Moves: '[0]'"
    )
    [shown] = example["board_as_lines"]([{"role": "user", "content": board}])
    assert shown["content"] == "0t2 345 m7t 03m t47 25t 04t 24m"  # X is to move
    assert set(shown["content"].split()) <= set(" ".join(example["vocabulary"]()).split())


def test_it_takes_a_model_of_ones_own_and_keeps_it_as_it_is_when_stopped(
    selfplay_run: tuple[Path, str], tmp_path: Path
) -> None:
    options = ["--model", str(selfplay_run[0] / "model"), "--max_turn_tokens", "3"]
    printed = stop_example("tictactoe_selfplay", tmp_path, signal.SIGTERM, *SHORT_SELFPLAY, *options)
    assert "step 1 of 100000: O wins " in printed
    assert "warm start" not in summary_of(tmp_path)["seconds"]


SHORT_TOOLS = ["--num_tasks", "30", "--num_demonstrations", "60", "--warm_start_steps", "4", "--num_train_tasks", "40"]


@pytest.fixture(scope="module")
def tools_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("tools")
    return output, call_example("tools", output, *SHORT_TOOLS, "--max_steps", "4", "--logging_steps", "4")


def test_it_compares_the_policy_with_random_and_optimal_play(tools_run: tuple[Path, str]) -> None:
    output, printed = tools_run
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


def test_it_takes_a_model_of_ones_own_and_ctrl_c_keeps_it_as_it_is(tools_run: tuple[Path, str], tmp_path: Path) -> None:
    options = ["--model", str(tools_run[0] / "model"), "--per_device_train_batch_size", "8", "--num_generations", "4"]
    options += ["--max_turn_tokens", "8", "--kinds", "price"]
    printed = stop_example("tools", tmp_path, signal.SIGINT, *SHORT_TOOLS, *options)
    summary = summary_of(tmp_path)
    assert "warm start" not in summary["seconds"]
    assert summary["env_config"] == {"kinds": ["price"], "max_price": 9, "max_steps_per_episode": 6}
    assert "after" in printed
