"""Which estimators give the gradient in expectation: exact, by enumeration of all groups of a tiny game.

No sampling: an expectation is a sum over all groups that can be drawn. ``tabular`` holds the game and its language
model; ``test_credit_biases`` what the other estimators come to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import (
    EVEN_ODDS,
    LOGITS,
    Array,
    Estimator,
    Game,
    Play,
    aggregated,
    at_tokens,
    at_turns,
    expected,
    fit,
    game,
    in_proportion,
    largest,
    moments,
    ordered_groups,
    unordered_groups,
    with_wrong_values,
)

from agentsgym.credit.advantages import get_estimator, gigpo, grpo, rebn, return_to_go, rloo
from agentsgym.credit.gae import bilevel_gae, turn_gae

TOLERANCE = 1e-12
GAME = game(4)


def shaped(function: Any, **options: Any) -> Estimator:
    return partial(get_estimator(partial(function, **options), potential_weight=0.8), discount=1.0, scale="none")


def remembering(name: str, **options: Any) -> Estimator:
    """With the baselines of an earlier batch, which no call changes for the next."""
    bound = get_estimator(name, decay=0.3, **options)
    bound([play.scored for play in GAME.plays[:9]], discount=1.0, scale="none")
    assert bound.state is not None
    kept: list[float] = [average for _, average in bound.state.state_dict()["baselines"]]
    assert len(kept) == 1  # there is one role
    assert min(map(abs, kept)) > 0.05
    return lambda rollouts: deepcopy(bound)(rollouts, discount=1.0, scale="none")


# An estimator, and how many times the gradient it is in expectation.
UNBIASED: dict[str, tuple[Estimator, float]] = {
    "rloo": (partial(rloo, scale="none"), 1.0),
    "rae": (remembering("rae"), 1.0),
    "return_to_go_others": (partial(return_to_go, scale="none"), 1.0),
    "return_to_go_batch": (partial(return_to_go, scale="none", baseline="batch"), 1.0),
    "return_to_go_role_ema": (remembering("return_to_go", baseline="role_ema"), 1.0),
    "return_to_go_none": (partial(return_to_go, scale="none", baseline="none"), 1.0),
    "gigpo_others": (partial(gigpo, scale="none", baseline="others"), 2.0),
    "gigpo_others_half": (partial(gigpo, scale="none", baseline="others", step_weight=0.5), 1.5),
    "turn_gae": (partial(turn_gae, scale="none", gae_lambda=1.0), 1.0),
    "bilevel_gae": (partial(bilevel_gae, scale="none", gae_lambda=1.0), 1.0),
    "shaped_return_to_go_none": (shaped(return_to_go, baseline="none"), 1.0),
    "shaped_return_to_go_others": (shaped(return_to_go), 1.0),
    "shaped_gigpo_others": (shaped(gigpo, baseline="others"), 2.0),
    "shaped_turn_gae": (shaped(turn_gae, gae_lambda=1.0), 1.0),
}
unbiased = pytest.mark.parametrize(("estimator", "factor"), UNBIASED.values(), ids=UNBIASED)


@pytest.mark.parametrize("horizon", [2, 3, 4])
def test_the_analytic_gradient_is_that_of_finite_differences(horizon: int) -> None:
    step = 1e-5
    gradient = game(horizon).gradient.reshape(LOGITS.shape)
    for index in np.ndindex(LOGITS.shape):
        shift = np.zeros_like(LOGITS)
        shift[index] = step
        there, back = (Game(horizon=horizon, logits=LOGITS + sign * shift).expected_return for sign in (1, -1))
        assert (there - back) / (2 * step) == pytest.approx(gradient[index], abs=1e-9)


def test_the_game_is_as_described() -> None:
    assert [len(game(horizon).plays) for horizon in (2, 3, 4)] == [7, 17, 41]
    assert math.fsum(play.probability for play in GAME.plays) == pytest.approx(1.0, abs=1e-15)
    assert {len(play.steps) for play in GAME.plays} == {1, 2, 3, 4}
    assert {length for play in GAME.plays for length in play.lengths} == {1, 2}
    assert {play.truncated for play in GAME.plays if len(play.steps) == 4} == {True, False}
    assert any(len(set(play.scored.state_keys)) < len(play.steps) for play in GAME.plays)
    assert largest(GAME.gradient) > 0.1


def test_the_values_are_exact() -> None:
    for one in (GAME, game(3, start=1)):
        assert one.value(one.start, one.horizon) == pytest.approx(one.expected_return, abs=1e-14)
    opening = {play.steps[0].word[:1]: play.values[0][-1] for play in GAME.plays if len(play.steps[0].word) == 2}
    [second] = opening.values()
    one_token = [play for play in GAME.plays if play.steps[0].word == (0,)]
    first = math.fsum(play.probability * play.final_reward for play in one_token)
    assert first + GAME.policy[0, 0, 1] * second == pytest.approx(GAME.expected_return, abs=1e-14)


def test_scores_have_mean_zero() -> None:
    for k in range(4):
        mean = np.sum([play.probability * play.turn_scores[k] for play in GAME.plays if len(play.steps) > k], axis=0)
        assert largest(mean) < TOLERANCE


@unbiased
def test_unbiased_over_all_pairs(estimator: Estimator, factor: float) -> None:
    gradient = expected(at_turns(estimator, with_wrong_values))
    assert largest(gradient - factor * GAME.gradient) < TOLERANCE


@unbiased
def test_unbiased_over_all_triples_on_the_tokens_of_trajectories(estimator: Estimator, factor: float) -> None:
    gradient = expected(at_tokens(estimator, with_wrong_values), num_rollouts=3, horizon=3)
    assert largest(gradient - factor * game(3).gradient) < TOLERANCE


@unbiased
def test_unbiased_over_batches_of_two_tasks(estimator: Estimator, factor: float) -> None:
    tasks = game(2, start=0), game(2, start=1)
    gradient = moments(unordered_groups(*tasks, num_rollouts=2), at_turns(estimator, with_wrong_values)).mean
    assert largest(gradient - factor * (tasks[0].gradient + tasks[1].gradient) / 2) < TOLERANCE


@unbiased
def test_rollouts_that_fail_by_chance_only_shorten_the_gradient(estimator: Estimator, factor: float) -> None:
    share, total = 0.3, np.zeros(LOGITS.size)
    for failed in itertools.product([False, True], repeat=2):

        def estimate(plays: Sequence[Play], failed: tuple[bool, ...] = failed) -> Sequence[Array]:
            flags = iter(failed)
            return at_turns(estimator, lambda play: replace(with_wrong_values(play), failed=next(flags)))(plays)

        chance = math.prod(share if one else 1 - share for one in failed)
        total += chance * expected(estimate, horizon=3)
    assert largest(total - (1 - share) * factor * game(3).gradient) < TOLERANCE


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(sorted(UNBIASED)),
    logits=st.lists(st.floats(-2, 2), min_size=LOGITS.size, max_size=LOGITS.size),
)
def test_unbiased_under_any_policy(name: str, logits: list[float]) -> None:
    one = Game(horizon=2, start=1, logits=np.reshape(logits, LOGITS.shape))
    estimator, factor = UNBIASED[name]
    gradient = moments(ordered_groups(one, num_rollouts=2), at_turns(estimator, with_wrong_values)).mean
    assert largest(gradient - factor * one.gradient) < TOLERANCE


@pytest.mark.parametrize(("num_rollouts", "horizon"), [(2, 4), (3, 3)])
def test_the_mean_of_all_shrinks_the_gradient_and_keeps_its_direction(num_rollouts: int, horizon: int) -> None:
    gradient = expected(at_turns(partial(grpo, scale="none")), num_rollouts=num_rollouts, horizon=horizon)
    factor = (num_rollouts - 1) / num_rollouts
    assert largest(gradient - factor * game(horizon).gradient) < TOLERANCE


@pytest.mark.parametrize("estimator", [turn_gae, bilevel_gae])
def test_exact_values_may_be_trusted(estimator: Any) -> None:
    for gae_lambda in (0.0, 0.7):
        gradient = expected(at_turns(partial(estimator, scale="none", gae_lambda=gae_lambda)), num_rollouts=1)
        assert largest(gradient - GAME.gradient) < TOLERANCE


def test_a_constant_divisor_is_a_scale_alone() -> None:
    gradient = expected(aggregated(at_turns(partial(rloo, scale="none")), "constant", constant=8))
    assert largest(gradient - GAME.gradient / 8) < TOLERANCE


def spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) + 1e-4


def test_rebn_keeps_the_direction_as_the_batch_grows() -> None:
    one = Game(horizon=3, logits=EVEN_ODDS)
    batch = in_proportion(one)
    gradient = moments([(1.0, batch)], at_turns(rebn)).mean
    returns = [math.fsum(play.rewards[k:]) for play in batch for k in range(len(play.steps))]
    assert largest(gradient - one.gradient / spread(returns)) < TOLERANCE


def test_in_large_groups_group_scale_weighs_tasks_and_batch_scale_does_not() -> None:
    tasks = [Game(horizon=2, start=start, logits=EVEN_ODDS) for start in (0, 2)]
    groups = [in_proportion(task) for task in tasks]
    by_group, by_batch = (
        moments([(1.0, [*groups[0], *groups[1]])], at_turns(partial(grpo, scale=scale))).mean
        for scale in ("group", "batch")
    )
    rewards = [[play.final_reward for play in group] for group in groups]
    each = [task.gradient / spread(own) for task, own in zip(tasks, rewards, strict=True)]
    assert largest(by_group - sum(each, np.zeros(LOGITS.size)) / 2) < TOLERANCE
    centered = [reward - float(np.mean(own)) for own in rewards for reward in own]
    truth = (tasks[0].gradient + tasks[1].gradient) / 2
    assert largest(by_batch - truth / spread(centered)) < TOLERANCE
    assert fit(by_group, truth).off > 0.1
