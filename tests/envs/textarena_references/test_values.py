"""Exact values against known ones and brute force."""

from __future__ import annotations

import functools
import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from agentsgym.envs.TextArena.references import frozen_lake, guess_the_number, reference_for
from agentsgym.envs.TextArena.references import kuhn_poker as kuhn
from agentsgym.envs.TextArena.references import tic_tac_toe as tic
from agentsgym.errors import ConfigError

# GuessTheNumber


@pytest.mark.parametrize("turns", [4, 7, 10])
def test_halving_always_finds_a_number_only_among_as_many_as_is_known(turns: int) -> None:
    total = guess_the_number.interval_values(2**turns, turns)[0][turns]
    assert total[2**turns - 1] == 2**turns - 1
    assert total[2**turns] < 2**turns


def guessed(low: int, high: int, turns: int, numbers: int) -> float:
    """What the best play earns, summed over the numbers of an interval, by trying every guess."""
    if low > high:
        return 0.0
    if turns == 1:
        return max(
            sum(1.0 if s == g else 1 - abs(s - g) / (numbers - 1) for s in range(low, high + 1))
            for g in range(low, high + 1)
        )
    return max(
        1 + guessed(low, g - 1, turns - 1, numbers) + guessed(g + 1, high, turns - 1, numbers)
        for g in range(low, high + 1)
    )


@pytest.mark.parametrize(("numbers", "turns"), [*itertools.product([2, 5, 8], [1, 2, 3])])
def test_intervals_are_worth_what_trying_every_guess_gives(numbers: int, turns: int) -> None:
    total, _ = guess_the_number.interval_values(numbers, turns)
    assert total[turns, numbers] == pytest.approx(guessed(0, numbers - 1, turns, numbers))


def test_random_guesses_earn_what_all_orders_give() -> None:
    earned = [
        1.0 if secret in order[:3] else 1 - abs(order[2] - secret) / 4
        for order in itertools.permutations(range(5))
        for secret in range(5)
    ]
    assert guess_the_number.random_value(5, 3) == pytest.approx(np.mean(earned))


# TicTacToe


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        ("random", "random", (0.585, 0.127, 0.288)),
        ("optimal", "random", (0.9948, 0.0052, 0.0)),
        ("random", "optimal", (0.0074, 0.0603, 0.9323)),
        ("safe", "safe", (0.0, 1.0, 0.0)),
    ],
)
def test_tic_tac_toe_ends_as_often_as_is_known(first: tic.Kind, second: tic.Kind, known: tuple[float, ...]) -> None:
    assert [float(p) for p in tic.outcome(tic.EMPTY, first, second)] == pytest.approx(known, abs=6e-4)


def test_safe_play_never_loses_and_the_best_reply_earns_at_least_as_much() -> None:
    assert tic.minimax(tic.EMPTY) == 0
    assert tic.outcome(tic.EMPTY, "safe", "random")[2] == tic.outcome(tic.EMPTY, "random", "safe")[0] == 0
    assert tic.outcome(tic.EMPTY, "safe", "optimal")[2] == 0
    assert tic.value(tic.EMPTY, "random", "optimal") <= tic.value(tic.EMPTY, "random", "safe")


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 5])
def test_a_limit_of_turns_is_worth_what_trying_every_game_gives(seat: int, turns: int) -> None:
    @functools.cache
    def mean(board: str, *, best: bool) -> float:
        won, mine = tic.winner(board), str(seat + 1)
        is_own = tic.to_move(board) == mine
        if won or "." not in board or (is_own and board.count(mine) == turns):
            return 0.0 if won is None else 1.0 if won == mine else -1.0
        results = [mean(tic.play(board, cell), best=best) for cell in tic.moves(board)]
        return max(results) if best and is_own else sum(results) / len(results)

    anchors = reference_for("TicTacToe-v0", max_steps_per_episode=turns, seat=seat).anchors()
    assert anchors.optimal == pytest.approx(mean(tic.EMPTY, best=True))
    assert anchors.random == pytest.approx(mean(tic.EMPTY, best=False))


# KuhnPoker


def test_kuhn_poker_is_worth_what_is_known() -> None:
    uniform = kuhn.UNIFORM
    assert kuhn.expected_chips(uniform, uniform) == Fraction(1, 8)
    assert kuhn.best_reply(uniform, Fraction, is_first=True)[0] == Fraction(1, 2)
    assert kuhn.best_reply(uniform, Fraction, is_first=False)[0] == Fraction(5, 12)


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 7), Fraction(1, 3)])
def test_no_reply_exploits_an_equilibrium(alpha: Fraction) -> None:
    strategy = kuhn.equilibrium(alpha)
    assert kuhn.expected_chips(strategy, strategy) == Fraction(-1, 18)
    assert kuhn.exploitability(strategy) == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_best_reply_is_the_best_of_all_pure_strategies(seed: int) -> None:
    rng = random.Random(seed)
    opponent = {key: Fraction(rng.randint(0, 4), 4) for key in kuhn.UNIFORM}
    for is_first, histories in ((True, ("", "cb")), (False, ("c", "b"))):
        keys = [key for key in kuhn.UNIFORM if key[1] in histories]
        results: list[Fraction] = []
        for choices in itertools.product((Fraction(0), Fraction(1)), repeat=6):
            own = dict(zip(keys, choices, strict=True))
            pair = (own, opponent) if is_first else (opponent, own)
            results.append((1 if is_first else -1) * kuhn.expected_chips(*pair))
        worth, strategy = kuhn.best_reply(opponent, Fraction, is_first=is_first)
        pair = (strategy, opponent) if is_first else (opponent, strategy)
        assert worth == max(results) == (1 if is_first else -1) * kuhn.expected_chips(*pair)


def test_a_match_of_one_round_is_the_round() -> None:
    match = kuhn.Match(1, seat=1)
    assert match.is_first(1)
    assert match.optimal == kuhn.best_reply(kuhn.UNIFORM, Fraction, is_first=True)[0]
    assert match.random == kuhn.expected_chips(kuhn.UNIFORM, kuhn.UNIFORM)
    seats = [kuhn.Match(2, seat=seat).random for seat in (0, 1)]
    assert seats[0] == -seats[1] == 0  # each begins once


# FrozenLake


def walked(holes: list[list[bool]], place: tuple[int, int], turns: int, *, best: bool) -> float:
    size = len(holes)
    way = (place[0] + place[1]) / (2 * (size - 1))
    earned = 0.0 if place == (0, 0) else max(0.1, min(0.95, way))
    if place == (size - 1, size - 1):
        return 1.0
    if turns == 0 or holes[place[0]][place[1]]:
        return earned
    steps = [(place[0] + a, place[1] + b) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))]
    results = [walked(holes, one, turns - 1, best=best) for one in steps if min(one) >= 0 and max(one) < size]
    return max(results) if best else sum(results) / len(results)


def test_a_frozen_lake_is_worth_what_recursion_gives() -> None:
    for holes in frozen_lake.solvable_maps(3, 2)[::3]:
        best, by_chance = frozen_lake.lake_values(holes[None], 5)
        rows = holes.tolist()
        assert by_chance[0, 0, 0] == pytest.approx(walked(rows, (0, 0), 5, best=False))
        assert best[0, 0, 0] == pytest.approx(walked(rows, (0, 0), 5, best=True))


def test_every_solvable_map_is_solved_with_turns_enough() -> None:
    assert len(frozen_lake.solvable_maps(4, 3)) < 364  # three of 14 fields, some around a corner
    assert frozen_lake.mean_values(4, 3, 20)[1] == 1.0


# What is not known


@pytest.mark.parametrize(
    ("game", "options", "max_steps", "sentence"),
    [
        ("Wordle-v0", {}, 100, "no exact reference is known for 'Wordle-v0'"),
        ("TicTacTo-v0", {}, 100, "did you mean 'TicTacToe-v0'"),
        ("Bandit-v0", {}, 100, "optimal play for Bandit, Mastermind and TowerOfHanoi was removed"),
        ("Mastermind-v0-extreme", {}, 100, "compare with the agent 'random'"),
        ("FrozenLake-v0-hardcore", {"size": 8}, 100, "at most 200000 maps"),
        ("KuhnPoker-v0", {}, 4, "needs enough turns for all rounds: max_steps_per_episode must be at least 5, got 4"),
        ("FrozenLake-v0", {}, 0, "max_steps_per_episode must be a positive int, got 0"),
    ],
)
def test_what_is_not_known_is_refused(game: str, options: dict[str, int], max_steps: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        reference_for(game, options, max_steps_per_episode=max_steps).anchors()


@pytest.mark.parametrize(("game", "seat"), [("TicTacToe-v0", 7), ("KuhnPoker-v0", 2), ("FrozenLake-v0", 1)])
def test_a_seat_that_a_game_has_not_is_refused(game: str, seat: int) -> None:
    with pytest.raises(ConfigError, match=rf"seat must be an int in \[0, \d\) or None for {game}, got {seat}"):
        reference_for(game, seat=seat)
    with pytest.raises(ConfigError, match=f"got {seat}"):
        reference_for(game)({"seat": seat})
