"""The example of TextArena's games as a person runs it, shortened."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from example_runs import FOLDER, call_example, run_example, summary_of

from agentsgym import Message, ScriptedAgent, Trajectory, evaluate
from agentsgym.envs import TextArenaEnv
from agentsgym.envs.TextArena.references import reference_for

SCRIPT = str(FOLDER / "textarena.py")
SHORT = ["--num_games", "16", "--num_demonstrations", "64", "--warm_start_steps", "3"]
PLAYERS = ["random", "optimal", "before", "after"]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    output = tmp_path_factory.mktemp("lake")
    printed = call_example("textarena", output, *SHORT, "--max_steps", "2")
    return output, summary_of(output), printed


def test_it_plays_learns_and_shows_how_well(lake: tuple[Path, dict[str, Any], str]) -> None:
    output, summary, printed = lake
    assert summary["env_config"]["game"] == "FrozenLake-v0"
    assert summary["optimal"]["win_rate"] == summary["optimal"]["fraction_of_optimal"] == 1.0
    for player in PLAYERS:
        assert 0 <= summary[player]["win_rate"] <= 1
        assert summary[player]["num_episodes"] == 16
    assert [line.split()[0] for line in printed.splitlines() if line.split()[:1] and line.split()[0] in PLAYERS] == (
        PLAYERS
    )
    assert "of optimal" in printed
    assert (output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "transcripts_after.txt").read_text(encoding="utf-8").count("=== task ") == 16


def test_a_model_of_ones_own_reads_the_words_of_a_game_without_a_reference(
    lake: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    options = ["--model", str(lake[0] / "model"), "--game", "Sudoku-v0-easy", "--max_steps_per_episode", "2"]
    options += ["--per_device_train_batch_size", "4", "--num_generations", "4", "--max_turn_tokens", "4"]
    run_example("textarena", tmp_path, *options, "--max_steps", "1", "--num_games", "4")
    summary = summary_of(tmp_path)
    assert "optimal" not in summary
    assert "warm start" not in summary["seconds"]
    assert summary["after"]["num_episodes"] == 4


def view_and_rollout(game: str, moves: list[str]) -> tuple[Any, Trajectory]:
    """The view that the tiny policy reads, and a rollout with the original text."""
    view = runpy.run_path(SCRIPT)["VIEWS"][game]
    env = TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 10})
    [rollout] = env.rollout([{"seed": 4}], ScriptedAgent(moves))
    return view, rollout


def test_the_view_of_a_lake_is_its_map() -> None:
    view, rollout = view_and_rollout("FrozenLake-v0", ["down"])
    opening: list[Message] = [*rollout.messages[:1]]
    board = [line for line in opening[0]["content"].splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in board for cell in line.strip("|").split("|")]
    [message] = view.render(opening)
    holes = [f"hole-{place // 4}-{place % 4}" for place, cell in enumerate(cells) if cell == "H"]
    assert message["content"].split() == ["you-0-0", *holes]
    assert view.moves(message["content"])[1] == ["down", "right"]


def test_the_view_of_guesses_is_what_is_left() -> None:
    secret = 1 + next(
        index for index in range(20) if view_and_rollout("GuessTheNumber-v0", [str(index + 1)])[1].info["success"]
    )
    guesses = [guess for guess in ("1", "20", "2", "19") if int(guess) != secret]
    view, rollout = view_and_rollout("GuessTheNumber-v0", guesses)
    low, high = (int(word.split("-")[1]) for word in view.render(rollout.messages)[0]["content"].split())
    assert low == max([int(guess) for guess in guesses if int(guess) < secret], default=0)
    assert high == min([int(guess) for guess in guesses if int(guess) > secret], default=21)


@pytest.mark.parametrize("game", ["FrozenLake-v0", "GuessTheNumber-v0"])
def test_every_word_of_a_view_is_in_the_vocabulary(game: str) -> None:
    view = runpy.run_path(SCRIPT)["VIEWS"][game]
    env = TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 10})
    player = reference_for(game, max_steps_per_episode=10).random_player(0)
    known = {word.strip() for word in view.words}
    for rollout in env.rollout([{"seed": seed} for seed in range(50)], player):
        for turn in range(1, len(rollout.messages), 2):
            assert set(view.render(rollout.messages[:turn])[0]["content"].split()) <= known


@pytest.mark.parametrize("game", ["FrozenLake-v0", "GuessTheNumber-v0"])
def test_the_player_to_imitate_wins_where_it_never_blunders(game: str) -> None:
    example = runpy.run_path(SCRIPT)
    view = example["VIEWS"][game]
    env = TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 6, "history": view.render})
    tasks = [{"seed": seed} for seed in range(40)]
    flawless, blind = (evaluate(env, example["Blunderer"](view, share, seed=0), tasks) for share in (0.0, 1.0))
    assert flawless.win_rate is not None
    assert blind.win_rate is not None
    assert flawless.win_rate.mean == 1.0
    assert blind.win_rate.mean < 0.6
