"""The example of self-play as a person runs it, shortened."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import pytest
from example_runs import FOLDER, call_example, stop_example, summary_of

from agentsgym.envs.TextArena import TextArenaEnv

SHORT = ["--num_games", "8", "--num_demonstrations", "32", "--warm_start_steps", "3"]
SHORT += ["--per_device_train_batch_size", "16", "--num_generations", "4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("selfplay")
    return output, call_example("tictactoe_selfplay", output, *SHORT, "--max_steps", "2")


def test_both_seats_are_rated_against_random_and_optimal_play(run: tuple[Path, str]) -> None:
    output, printed = run
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


def test_it_takes_a_model_of_ones_own_and_keeps_it_as_it_is_when_stopped(run: tuple[Path, str], tmp_path: Path) -> None:
    options = ["--model", str(run[0] / "model"), "--max_turn_tokens", "3"]
    printed = stop_example("tictactoe_selfplay", tmp_path, signal.SIGTERM, *SHORT, *options)
    assert "step 1 of 100000: O wins " in printed
    assert "warm start" not in summary_of(tmp_path)["seconds"]
