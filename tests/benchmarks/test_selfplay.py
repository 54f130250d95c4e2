"""The benchmark of self-play: the game is right, ratings are exact, and seats that are rewarded apart get better."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from benchmarks.selfplay import (
    ARMS,
    EMPTY,
    Arm,
    Table,
    learn,
    moves,
    play,
    play_perfectly,
    play_randomly,
    rate,
    row,
    scored,
    winner,
    worth,
)


def test_the_game_is_the_one_that_everybody_knows() -> None:
    assert [len(moves(board)) for board in (EMPTY, "XXX.OO...", "XOXXOOOXX")] == [9, 0, 0]
    assert [winner(board) for board in ("XXX.OO...", "XX.OOOX..", "XOXXOOOXX")] == ["X", "O", ""]
    assert worth(EMPTY) == 0
    assert worth("X...O....") == 0
    assert worth("XO.......") == 1


def test_ratings_are_exact() -> None:
    assert rate(play_randomly, "X", play_randomly).won == pytest.approx(737 / 1260)  # the known 58.5 %
    assert rate(play_randomly, "O", play_randomly).won == pytest.approx(121 / 420)  # and 28.8 %
    for role in "XO":
        assert rate(play_perfectly, role, play_perfectly).drawn == pytest.approx(1.0)
        perfect = rate(play_perfectly, role, play_randomly)
        assert perfect.won + perfect.drawn == pytest.approx(1.0)


def test_a_game_is_scored_by_seat_or_with_one_reward_for_both() -> None:
    generator = random.Random(0)
    for _ in range(50):
        game = play(Table(), generator)
        separate, shared = (scored(game, 0, by_seat=one) for one in (True, False))
        by_role = {
            role: sum(earned for earned, own in zip(separate.turn_rewards, separate.roles, strict=True) if own == role)
            for role in "XO"
        }
        assert by_role == separate.final_rewards
        assert sum(by_role.values()) == 0
        assert sum(shared.turn_rewards) == shared.final_reward == bool(game.winner)


def test_seats_that_are_rewarded_separately_get_better() -> None:
    arm = Arm("rae")
    random_play = fmean(rate(play_randomly, role, play_randomly).won for role in "XO")
    by_seat, shared = (fmean(row(arm._replace(by_seat=separate), [1], 5_000)[:2]) for separate in (True, False))
    assert by_seat > random_play + 0.05
    assert by_seat > shared + 0.05


def test_learning_is_reproducible() -> None:
    first, again = (learn(ARMS[0], seed=3, num_games=256).logits for _ in range(2))
    assert first == again
