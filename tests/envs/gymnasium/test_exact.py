"""Values of Gymnasium's tabular games against published ones, brute force and real play."""

from __future__ import annotations

import itertools
import random
from typing import Any

import gymnasium
import numpy as np
import pytest

from agentsgym.envs.Gymnasium import GymnasiumEnv
from agentsgym.envs.Gymnasium.exact import Outcome, blackjack_hands, blackjack_transitions, legal_outcomes, value_table


def values(config: dict[str, Any]) -> Any:
    exact = GymnasiumEnv(None, config).exact_values()
    assert exact is not None
    return exact.values


@pytest.mark.parametrize(("horizon", "goal"), [(10, 0.0414), (20, 0.1991), (50, 0.546), (100, 0.7442)])
def test_slippery_ice_is_crossed_as_often_as_is_known(horizon: int, goal: float) -> None:
    table = values({"max_steps_per_episode": horizon})
    assert table.optimal[horizon, 0] == pytest.approx(goal, abs=5e-4)


def test_random_steps_cross_slippery_ice_as_seldom_as_is_known() -> None:
    assert values({"max_steps_per_episode": 10}).random[10, 0] == pytest.approx(0.0055, abs=6e-5)
    assert values({"max_steps_per_episode": 100}).random[100, 0] == pytest.approx(0.0139, abs=6e-5)


def test_the_way_along_the_cliff_costs_thirteen() -> None:
    table = values({"id": "CliffWalking-v1"})
    assert table.optimal[20, 36] == -13
    assert table.optimal[12, 36] == -12  # too few turns: each of them costs 1


def brute_force(transitions: list[list[list[Outcome]]], state: int, turns: int, *, best: bool) -> float:
    if turns == 0:
        return 0.0
    worths = [
        sum(
            p * (reward + (0 if ended else brute_force(transitions, following, turns - 1, best=best)))
            for p, following, reward, ended in outcomes
        )
        for outcomes in transitions[state]
    ]
    return max(worths) if best else sum(worths) / len(worths)


@pytest.mark.parametrize("seed", range(10))
def test_value_iteration_is_what_recursion_gives(seed: int) -> None:
    rng = random.Random(seed)
    transitions: list[list[list[Outcome]]] = [
        [
            [(p, rng.randrange(4), rng.uniform(-1, 1), rng.random() < 0.3) for p in (0.25, 0.75)]
            for _ in range(rng.randint(1, 3))
        ]
        for _ in range(4)
    ]
    table = value_table(transitions, 4)
    for state, turns in itertools.product(range(4), range(5)):
        assert table.optimal[turns, state] == pytest.approx(brute_force(transitions, state, turns, best=True))
        assert table.random[turns, state] == pytest.approx(brute_force(transitions, state, turns, best=False))


def test_among_equal_ways_the_shortest_is_taken() -> None:
    around: list[list[list[Outcome]]] = [[[(1.0, 1, 0.0, False)], [(1.0, 0, 1.0, True)]], [[(1.0, 0, 0.0, False)]]]
    table = value_table(around, 9)
    assert table.optimal[9].tolist() == [1.0, 1.0]
    assert table.policy[9, 0] == 1


def test_every_hand_of_blackjack_has_outcomes_that_add_up() -> None:
    for actions in blackjack_transitions().values():
        for outcomes in actions.values():
            assert sum(p for p, *_ in outcomes) == pytest.approx(1.0)


@pytest.mark.parametrize("rules", [{"sab": False}, {"sab": False, "natural": True}, {"sab": True}])
def test_blackjack_gives_what_its_table_states(rules: dict[str, bool]) -> None:
    table = legal_outcomes(blackjack_transitions(**rules), (0, 1))
    numbers = {hand: number for number, hand in enumerate(blackjack_hands())}
    game: Any = gymnasium.make("Blackjack-v1", **rules)
    inner = game.unwrapped
    game.reset(seed=3)
    for player, dealer in (([10, 1], 10), ([1, 7], 6), ([10, 6], 10)):
        means: list[float] = []
        for _ in range(2000):
            game.reset()
            inner.player, inner.dealer = [*player], [dealer, int(inner.np_random.choice([*range(1, 11), 10, 10, 10]))]
            means.append(float(game.step(0)[1]))
        total = sum(player) + 10 * (1 in player)
        state = numbers[(total, dealer, 1 in player, total == 21)]
        expected = sum(p * reward for p, _, reward, _ in table[state][0])
        assert np.mean(means) == pytest.approx(expected, abs=4 * max(0.01, float(np.std(means))) / 2000**0.5)


def test_the_best_play_of_blackjack_stands_on_hard_seventeen_and_draws_to_eleven() -> None:
    policy = values({"id": "Blackjack-v1"}).policy[20]
    choice = {hand: policy[number] for number, hand in enumerate(blackjack_hands())}
    for dealer in range(1, 11):
        assert choice[11, dealer, False, False] == 1
        assert choice[17, dealer, False, False] == 0
        assert choice[17, dealer, True, False] == 1  # an ace: nothing can be lost
    assert choice[13, 6, False, False] == 0
    assert choice[16, 10, False, False] == 1
