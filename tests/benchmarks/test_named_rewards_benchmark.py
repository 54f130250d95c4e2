"""The benchmark of named rewards plays both games, trains, and draws what it found."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentsgym import ScriptedAgent
from benchmarks.named_rewards import AGGREGATIONS, GAMES, Parcels, Routes, cost, draw, learn, table


@pytest.mark.parametrize("game", GAMES)
def test_a_game_is_trained_and_scored(game: str) -> None:
    run = learn(game, "normalize_then_sum", seed=0, num_steps=1)
    assert run["scores"].keys() == {*GAMES[game][1]}
    assert all(0 <= score <= 1 for pair in run["scores"].values() for score in pair)


def test_the_right_actions_of_both_games_are_scored_as_right() -> None:
    [played] = Routes().rollout([{"seed": 1}], ScriptedAgent(["sure"], repeat_last=True))
    assert played.info["sure"] == 1
    assert played.final_components is not None
    assert played.final_components["short"] == 0
    env = Parcels()
    messages, done, info = env.reset({"seed": 1}), False, dict[str, float]()
    while not done:
        place, kind = messages[-1]["content"].split(", ")
        messages, _, done, info = env.step(f"{place} {'gently' if kind == 'fragile' else 'fast'}")
    assert (info["address"], info["handling"]) == (1, 1)


def test_the_curves_of_all_scores_are_drawn(tmp_path: Path) -> None:
    runs = [learn(game, one, seed=0, num_steps=20) for game in GAMES for one in AGGREGATIONS]
    assert all(len(curve) == len(run["steps"]) == 2 for run in runs for curve in run["curves"].values())
    draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_cost_of_names_is_a_time_and_a_ratio() -> None:
    found = cost(num_repeats=1)
    assert found.keys() == {"instant", "embedded policy"}
    assert all(microseconds > 0 and ratio > 0 for microseconds, ratio in found.values())


def test_the_table_has_a_row_per_score_with_intervals() -> None:
    runs = [
        {"game": game, "aggregation": one, "seed": seed, "scores": dict.fromkeys(names, (0.25, 0.5 + seed / 10))}
        for game, (_, names) in GAMES.items()
        for one in AGGREGATIONS
        for seed in (0, 1)
    ]
    lines = table(runs).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ["address", "handling", "sure"]
    assert all("55% [0%, 100%]" in line and "25%" in line for line in lines[2:])
