"""Which estimators give the gradient in expectation: exact, by enumeration of all groups on a tiny game.

Two states, three moves (one of them ends the game), a softmax over tabular logits: episodes differ in length, return
to states they have seen, and are cut at the horizon. No sampling: an expectation is a sum over all groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray

from agentsgym.credit.advantages import ScoredRollout, gigpo, grpo, return_to_go, rloo

Array = NDArray[np.float64]
Episode = tuple[tuple[int, int, float], ...]  # (state, move, reward) of each turn
Estimator = Callable[..., list[list[float]]]

LOGITS = np.array([[0.3, -0.2, 0.1], [-0.4, 0.5, 0.2]])
GAME = {  # (state, move): (what it pays, the next state; None is the end)
    (0, 0): (-0.1, 0),
    (0, 1): (0.2, 1),
    (0, 2): (0.5, None),
    (1, 0): (0.3, 0),
    (1, 1): (-0.4, 1),
    (1, 2): (1.0, None),
}
SIZES = [(2, 4), (3, 3)]  # rollouts in a group, horizon
sizes = pytest.mark.parametrize(("num_rollouts", "horizon"), SIZES)


@cache
def episodes(horizon: int, state: int | None = 0) -> list[Episode]:
    """Every episode, as a tuple of (state, move, reward)."""
    if state is None or horizon == 0:
        return [()]
    found = []
    for move in range(3):
        paid, following = GAME[state, move]
        found += [((state, move, paid), *rest) for rest in episodes(horizon - 1, following)]
    return found


def softmax(logits: Array) -> Array:
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


def probability(episode: Episode, logits: Array = LOGITS) -> float:
    policy = softmax(logits)
    return math.prod(policy[state, move] for state, move, _ in episode)


def expected_return(horizon: int, logits: Array) -> float:
    return sum(probability(episode, logits) * sum(paid for _, _, paid in episode) for episode in episodes(horizon))


def scored(episode: Episode) -> ScoredRollout:
    rewards = [paid for _, _, paid in episode]
    keys = [state for state, _, _ in episode]
    return ScoredRollout(turn_rewards=rewards, final_reward=sum(rewards), group=0, state_keys=keys)


def surrogate_gradient(episode: Episode, advantages: Sequence[float]) -> Array:
    """Σ_k A_k ∇ log π(move_k | state_k)."""
    policy = softmax(LOGITS)
    gradient = np.zeros_like(LOGITS)
    for (state, move, _), advantage in zip(episode, advantages, strict=True):
        gradient[state] -= advantage * policy[state]
        gradient[state, move] += advantage
    return gradient


@cache
def true_gradient(horizon: int) -> Array:
    return sum(
        probability(episode) * surrogate_gradient(episode, [sum(paid for _, _, paid in episode)] * len(episode))
        for episode in episodes(horizon)
    )


def expected_gradient(estimator: Estimator, num_rollouts: int, horizon: int) -> Array:
    """The mean over the group's rollouts, in expectation over all groups."""
    total = np.zeros_like(LOGITS)
    for group in itertools.product(episodes(horizon), repeat=num_rollouts):
        advantages = estimator([scored(episode) for episode in group], discount=1.0)
        weight = math.prod(probability(episode) for episode in group) / num_rollouts
        for episode, numbers in zip(group, advantages, strict=True):
            total += weight * surrogate_gradient(episode, numbers)
    return total


@pytest.mark.parametrize("horizon", [3, 4])
def test_the_analytic_gradient_is_that_of_finite_differences(horizon: int) -> None:
    step = 1e-5
    for index in np.ndindex(LOGITS.shape):
        shift = np.zeros_like(LOGITS)
        shift[index] = step
        slope = expected_return(horizon, LOGITS + shift) - expected_return(horizon, LOGITS - shift)
        assert slope / (2 * step) == pytest.approx(true_gradient(horizon)[index], abs=1e-9)


def test_the_game_is_as_described() -> None:
    assert sum(map(probability, episodes(4))) == pytest.approx(1.0)
    assert {len(episode) for episode in episodes(4)} == {1, 2, 3, 4}
    assert np.abs(true_gradient(4)).max() > 0.02


@sizes
@pytest.mark.parametrize(
    ("estimator", "factor"),
    [
        (partial(rloo, scale="none"), 1.0),
        (partial(return_to_go, scale="none"), 1.0),
        (partial(gigpo, scale="none", baseline="others"), 2.0),
        (partial(gigpo, scale="none", baseline="others", step_weight=0.5), 1.5),
    ],
    ids=["rloo", "return_to_go", "gigpo_others", "gigpo_others_half"],
)
def test_leaving_the_rollout_out_of_its_baseline_is_unbiased(
    estimator: Estimator, factor: float, num_rollouts: int, horizon: int
) -> None:
    gradient = expected_gradient(estimator, num_rollouts, horizon)
    assert np.abs(gradient - factor * true_gradient(horizon)).max() < 1e-12


@sizes
def test_the_mean_of_all_shrinks_the_gradient_and_keeps_its_direction(num_rollouts: int, horizon: int) -> None:
    gradient = expected_gradient(partial(grpo, scale="none"), num_rollouts, horizon)
    factor = (num_rollouts - 1) / num_rollouts
    assert np.abs(gradient - factor * true_gradient(horizon)).max() < 1e-12


def direction_error(gradient: Array, truth: Array) -> float:
    """The part of the gradient that is at right angles to the true one, as a share of its length."""
    along = np.sum(gradient * truth) / np.sum(truth * truth)
    return np.linalg.norm(gradient - along * truth) / np.linalg.norm(gradient)


@pytest.mark.parametrize(
    "estimator",
    [
        partial(gigpo, scale="none", baseline="self"),  # a rollout that comes back to a state judges itself
        partial(grpo, scale="group"),
        partial(return_to_go, scale="group"),
    ],
    ids=["gigpo_self", "grpo_group", "return_to_go_group"],
)
def test_what_the_docstrings_call_biased_is(estimator: Estimator) -> None:
    gradient = expected_gradient(estimator, num_rollouts=2, horizon=4)
    assert direction_error(gradient, true_gradient(4)) > 0.01


def bandit_slope(estimator: Estimator, num_rollouts: int) -> float:
    """E[Σ A ∇ log π(high)] / n on two arms, policy uniform: low pays .1 for sure, high pays 1 in a quarter of cases."""
    outcomes = [(-0.5, 0.1, 1 / 2), (0.5, 0.0, 3 / 8), (0.5, 1.0, 1 / 8)]  # (score of "high", reward, probability)
    slope = 0.0
    for group in itertools.product(outcomes, repeat=num_rollouts):
        rollouts = [
            ScoredRollout(turn_rewards=[paid], final_reward=paid, group=0, state_keys=[None]) for _, paid, _ in group
        ]
        numbers = [row[0] for row in estimator(rollouts)]
        weight = math.prod(chance for _, _, chance in group) / num_rollouts
        slope += weight * sum(number * score for number, (score, _, _) in zip(numbers, group, strict=True))
    return slope


@pytest.mark.parametrize("num_rollouts", [2, 4])
def test_a_rare_win_is_learnt_without_scale_and_unlearnt_with_group_scale(num_rollouts: int) -> None:
    true_slope = 0.25 * (0.25 - 0.1)
    assert bandit_slope(partial(rloo, scale="none"), num_rollouts) == pytest.approx(true_slope, abs=1e-12)
    centred = true_slope * (num_rollouts - 1) / num_rollouts
    assert bandit_slope(partial(grpo, scale="none"), num_rollouts) == pytest.approx(centred, abs=1e-12)
    assert bandit_slope(partial(grpo, scale="group"), num_rollouts) < -0.08


def test_the_wrong_sign_of_group_scale_in_numbers() -> None:
    assert bandit_slope(partial(grpo, scale="group"), 4) == pytest.approx(-0.120, abs=5e-4)
