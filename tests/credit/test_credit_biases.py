"""What the biased estimators come to: their expectation, by enumeration of all groups, against a form that is known.

Where there is such a form the two must agree to the last digits; everywhere the distance from the gradient's direction
must be what makes the estimator biased, and no slip of floating point. ``tabular`` holds the game.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from tabular import (
    Array,
    Estimate,
    Estimator,
    Group,
    Play,
    aggregated,
    at_turns,
    expected,
    fit,
    game,
    largest,
    masking_truncated,
    moments,
    ordered_groups,
    with_wrong_values,
)

from agentsgym.credit.advantages import (
    ScoredRollout,
    gigpo,
    grpo,
    mt_grpo,
    rae,
    rebn,
    return_to_go,
    reward,
    rloo,
    zero_variance_groups,
)
from agentsgym.credit.gae import turn_gae

TOLERANCE = 1e-12
GAME = game(4)


def over_plays(gradient_of: Callable[[Play], Array], plays: Sequence[Play] = GAME.plays) -> Array:
    """The sum over episodes of a vector each, times how often the episode happens, (P,)."""
    return np.sum([play.probability * gradient_of(play) for play in plays], axis=0)


def assert_biased(estimate: Estimate, known: Array, *, off: float) -> None:
    """Its expectation is ``known``, which is at least ``off`` away from the direction of the gradient."""
    gradient = expected(estimate)
    assert largest(gradient - known) < TOLERANCE
    assert fit(gradient, GAME.gradient).off > off


def test_each_turns_own_reward_is_the_gradient_of_no_return() -> None:
    known = over_plays(lambda play: play.rewards @ play.turn_scores)
    assert_biased(at_turns(reward), known, off=0.5)


def reset_at_observations(plays: Sequence[Play]) -> list[Array]:
    """REINFORCE++ as it is often written: rewards on each turn's last token, returns set to 0 by every masked token."""
    found: list[Array] = []
    for play in plays:
        mask = play.trajectory.agent_token_mask
        earned = {turn.stop - 1: turn.reward for turn in play.trajectory.turns}
        returns, following = np.zeros(len(mask)), 0.0
        for t in reversed(range(len(mask))):
            following = (earned.get(t, 0.0) + following) * mask[t]
            returns[t] = following
        found.append(returns[np.array(mask) == 1])
    return found


def test_returns_that_observations_reset_are_each_turns_own_reward() -> None:
    assert_biased(reset_at_observations, expected(at_turns(reward)), off=0.5)


def test_a_discount_is_the_gradient_of_no_return() -> None:
    def discounted(play: Play) -> Array:
        following = [sum(0.5**j * earned for j, earned in enumerate(play.rewards[k:])) for k in range(len(play.steps))]
        return following @ play.turn_scores

    assert_biased(at_turns(partial(return_to_go, scale="none", discount=0.5)), over_plays(discounted), off=0.2)


def test_group_scale_in_pairs_compares_only_who_earned_more() -> None:
    def against(play: Play) -> float:
        differences = ((play.final_reward - other.final_reward, other.probability) for other in GAME.plays)
        return sum(chance * d / 2 / (abs(d) / math.sqrt(2) + 1e-4) for d, chance in differences if abs(d) > 1e-9)

    known = over_plays(lambda play: against(play) * play.scores.sum(0))
    assert_biased(at_turns(partial(grpo, scale="group")), known, off=0.8)


def test_mt_grpo_climbs_the_reward_of_the_turns_beside_the_outcome() -> None:
    """Half the covariance of the reward and the score of each turn, over the rollouts that go on, beside half of ∇J."""
    known = GAME.gradient / 2
    for k in range(3):
        going_on = [play for play in GAME.plays if len(play.steps) > k + 1]
        chance = math.fsum(play.probability for play in going_on)
        earned = math.fsum(play.probability * play.rewards[k] for play in going_on)
        score = over_plays(lambda play, k=k: play.turn_scores[k], going_on)
        both = over_plays(lambda play, k=k: play.rewards[k] * play.turn_scores[k], going_on)
        known = known + (chance * both - earned * score) / 2
    assert_biased(at_turns(partial(mt_grpo, scale="none")), known, off=0.05)


def test_turn_gae_is_as_biased_as_the_values_are_wrong() -> None:
    gae_lambda = 0.4

    def bias(play: Play) -> Array:
        """(1 - λ) Σ_j λ^j e_{k+1+j} for each turn k, e what is wrong with a turn's value."""
        errors = [wrong[0] - right[0] for wrong, right in zip(with_wrong_values(play).values, play.values, strict=True)]
        ahead = [
            (1 - gae_lambda) * sum(gae_lambda**j * error for j, error in enumerate(errors[k + 1 :]))
            for k in range(len(errors))
        ]
        return ahead @ play.turn_scores

    estimate = at_turns(partial(turn_gae, scale="none", gae_lambda=gae_lambda), with_wrong_values)
    assert_biased(estimate, GAME.gradient + over_plays(bias), off=0.1)


@pytest.mark.parametrize("aggregation", ["trajectory", "turn", "token", "group"])
def test_a_mean_over_what_the_policy_made_longer_is_biased(aggregation: str) -> None:
    estimate = aggregated(at_turns(partial(rloo, scale="none")), aggregation)
    assert fit(expected(estimate), GAME.gradient).off > 0.02


def test_the_mean_over_trajectories_in_closed_form() -> None:
    each = over_plays(lambda play: (play.final_reward - GAME.expected_return) * play.scores.mean(0))
    assert_biased(aggregated(at_turns(partial(rloo, scale="none")), "trajectory"), each, off=0.1)


def test_masking_truncated_rollouts_climbs_another_objective() -> None:
    """∇E[R·1] - E[R]·∇P(ended), 1 where the game itself ended the episode."""
    ended = [play for play in GAME.plays if not play.truncated]
    known = over_plays(lambda play: (play.final_reward - GAME.expected_return) * play.scores.sum(0), ended)
    assert_biased(masking_truncated(at_turns(partial(rloo, scale="none"))), known, off=0.3)


def test_penalizing_truncated_rollouts_is_exactly_the_gradient_with_the_penalty() -> None:
    penalty = 0.7

    def penalized(play: Play) -> ScoredRollout:
        rewards = [*play.rewards[:-1], play.rewards[-1] - penalty * play.truncated]
        return replace(play.scored, turn_rewards=rewards, final_reward=sum(rewards))

    known = over_plays(lambda play: (play.final_reward - penalty * play.truncated) * play.scores.sum(0))
    for estimator in (rloo, return_to_go):
        assert largest(expected(at_turns(partial(estimator, scale="none"), penalized)) - known) < TOLERANCE


@cache
def kept_groups() -> tuple[list[Group], float]:
    """The pairs whose final rewards differ, drawn until one comes, and the share of those that are kept."""
    groups = [
        (chance, plays)
        for chance, plays in ordered_groups(GAME, num_rollouts=2)
        if not zero_variance_groups([play.scored for play in plays])
    ]
    share = math.fsum(chance for chance, _ in groups)
    return [(chance / share, plays) for chance, plays in groups], share


def test_resampling_groups_of_equal_reward_is_a_scale_where_they_teach_nothing_anyway() -> None:
    groups, share = kept_groups()
    assert 0.5 < share < 0.95
    gradient = moments(groups, at_turns(partial(rloo, scale="none"))).mean
    assert largest(gradient - GAME.gradient / share) < TOLERANCE


@pytest.mark.parametrize("baseline", ["others", "none"])
def test_dropping_groups_of_equal_reward_is_biased_where_turns_are_distinguished(baseline: Any) -> None:
    groups, share = kept_groups()
    gradient = moments(groups, at_turns(partial(return_to_go, scale="none", baseline=baseline))).mean
    assert fit(gradient, GAME.gradient).off > 0.001
    assert largest(share * gradient - GAME.gradient) > 1e-4


@pytest.mark.parametrize(
    "estimator",
    [
        partial(gigpo, scale="none", baseline="self"),  # a rollout that comes back to a state judges itself
        partial(gigpo, scale="group"),
        partial(return_to_go, scale="group"),
        partial(rebn, scale="none"),  # a small batch knows its own returns
        rebn,
        partial(rae, scale="group"),
        mt_grpo,
    ],
    ids=["gigpo_self", "gigpo_group", "return_to_go_group", "rebn_centered", "rebn", "rae_group", "mt_grpo"],
)
def test_what_the_docstrings_call_biased_is(estimator: Estimator) -> None:
    assert fit(expected(at_turns(estimator)), GAME.gradient).off > 0.1


def test_rebn_comes_closer_as_the_batch_grows() -> None:
    offs = [fit(expected(at_turns(rebn), num_rollouts=num, horizon=2), game(2).gradient).off for num in (2, 3, 4)]
    assert offs[0] > offs[1] > offs[2] > 0.01


def bandit_slope(estimator: Callable[..., Any], num_rollouts: int) -> float:
    """E[Σ A ∇ log π(high)] / n on two arms, policy uniform: low gives .1 for sure, high 1 in a quarter of cases."""
    outcomes = [(-0.5, 0.1, 1 / 2), (0.5, 0.0, 3 / 8), (0.5, 1.0, 1 / 8)]  # (score of "high", reward, probability)
    slope = 0.0
    for group in itertools.product(outcomes, repeat=num_rollouts):
        rollouts = [
            ScoredRollout(turn_rewards=[earned], final_reward=earned, group=0, state_keys=[None])
            for _, earned, _ in group
        ]
        numbers = [row[0] for row in estimator(rollouts)]
        weight = math.prod(chance for _, _, chance in group) / num_rollouts
        slope += weight * sum(number * score for number, (score, _, _) in zip(numbers, group, strict=True))
    return slope


@pytest.mark.parametrize("num_rollouts", [2, 4])
def test_a_rare_win_is_learnt_without_scale_and_unlearnt_with_group_scale(num_rollouts: int) -> None:
    true_slope = 0.25 * (0.25 - 0.1)
    assert bandit_slope(partial(rloo, scale="none"), num_rollouts) == pytest.approx(true_slope, abs=1e-12)
    centered = true_slope * (num_rollouts - 1) / num_rollouts
    assert bandit_slope(partial(grpo, scale="none"), num_rollouts) == pytest.approx(centered, abs=1e-12)
    assert bandit_slope(partial(grpo, scale="group"), num_rollouts) < -0.08


def test_the_wrong_sign_of_group_scale_in_numbers() -> None:
    assert bandit_slope(partial(grpo, scale="group"), 4) == pytest.approx(-0.120, abs=5e-4)
