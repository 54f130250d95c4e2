"""Potential-based shaping: what it moves, what it leaves alone, and what it needs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import Batch, assert_close, batches, discounts, rollout, scales

from agentsgym.credit.advantages import Scale, ScoredRollout, get_estimator, mt_grpo, return_to_go, rloo
from agentsgym.credit.bound import shaped
from agentsgym.credit.returns import discounted_returns
from agentsgym.errors import ConfigError

weights = st.sampled_from([-1.0, 0.0, 0.5, 2.0])


def valued(rewards: Sequence[float], potentials: Sequence[float | None], **more: Any) -> ScoredRollout:
    return replace(rollout(rewards, **more), potentials=potentials)


def test_shaped_rewards_by_hand() -> None:
    [one] = shaped([valued([1.0, 0.0, 2.0], [-4.0, -2.0, 8.0])], discount=0.5, weight=0.5)
    assert one.turn_rewards == [1 + 0.5 * (-1 + 4), 0.5 * (4 + 2), 2 - 4]
    assert one.final_reward == 3.0
    assert shaped([valued([], [])], discount=0.5, weight=0.5) == [valued([], [])]


@given(batches, discounts, weights)
def test_a_shaped_return_is_the_return_minus_the_potential(rollouts: Batch, discount: float, weight: float) -> None:
    for before, after in zip(rollouts, shaped(rollouts, discount=discount, weight=weight), strict=True):
        assert replace(after, turn_rewards=before.turn_rewards) == before  # nothing else has changed
        returns = discounted_returns(before.turn_rewards, discount=discount)
        moved = [own - weight * value for own, value in zip(returns, before.potentials, strict=True)]
        expected = moved if before.included else returns
        assert discounted_returns(after.turn_rewards, discount=discount) == pytest.approx(expected, abs=1e-9)


@given(batches, scales, discounts)
def test_potentials_that_depend_on_the_turn_alone_do_not_move_a_comparison_at_the_same_turn(
    rollouts: Batch, scale: Scale, discount: float
) -> None:
    twice = [replace(one, potentials=[3.0 - k for k in range(len(one.turn_rewards))]) for one in rollouts * 2]
    estimate = partial(return_to_go, discount=discount, scale=scale)
    assert_close(estimate(shaped(twice, discount=discount, weight=2.0)), estimate(twice))


@given(batches, scales, discounts, weights)
def test_the_wrapper_gives_its_estimator_shaped_rollouts(
    rollouts: Batch, scale: Scale, discount: float, weight: float
) -> None:
    wrapper = get_estimator("return_to_go", baseline="role_ema", decay=0.5, potential_weight=weight)
    plain = get_estimator("return_to_go", baseline="role_ema", decay=0.5)
    for _ in range(2):
        expected = plain(shaped(rollouts, discount=discount, weight=weight), discount=discount, scale=scale)
        assert wrapper(rollouts, discount=discount, scale=scale) == expected
    assert wrapper.state == plain.state


def test_the_wrapper_shows_what_it_wraps_and_can_be_copied() -> None:
    inner = get_estimator("mt_grpo", turn_weight=2.0)
    wrapper = get_estimator(inner, potential_weight=0.5)
    assert (wrapper.function, wrapper.options, wrapper.state) == (mt_grpo, {"turn_weight": 2.0}, None)
    assert get_estimator(wrapper) is wrapper
    assert pickle.loads(pickle.dumps(wrapper)) == copy.deepcopy(wrapper) == wrapper
    assert get_estimator(mt_grpo, potential_weight=0.5).function is mt_grpo


def test_a_game_that_does_not_name_what_a_state_is_worth_is_refused() -> None:
    message = r"`_potential` must return a number, got None in 1 of 2 turns of chess"
    with pytest.raises(ConfigError, match=message):
        shaped([valued([0.0, 1.0], [-1.0, None], environment="chess")], discount=1.0, weight=1.0)
    with pytest.raises(ConfigError, match=r"got None in 2 of 2 turns$"):
        shaped([rollout([0.0, 1.0])], discount=1.0, weight=1.0)
    broken = rollout([0.0, 1.0], failed=True)
    assert shaped([broken], discount=1.0, weight=1.0) == [broken]


@pytest.mark.parametrize("name", ["grpo", "rloo", "rae", "reward"])
def test_an_estimator_that_shaping_cannot_reach_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"potential_weight would have no effect on the estimator '{name}'"):
        get_estimator(name, potential_weight=1.0)
    with pytest.raises(ConfigError, match="it uses only final rewards"):
        get_estimator(rloo, potential_weight=1.0)


def test_a_weight_that_is_no_number_is_refused() -> None:
    for weight in (float("inf"), None, "1"):
        with pytest.raises(ConfigError, match="potential_weight must be a finite number, got"):
            get_estimator(return_to_go, potential_weight=weight)
        with pytest.raises(ConfigError, match="potential_weight must be a finite number, got"):
            shaped([], discount=1.0, weight=weight)


def test_the_weight_of_shaping_is_an_option_of_any_estimator_that_can_use_it() -> None:
    for one in ("return_to_go", return_to_go, partial(return_to_go, potential_weight=0.5), get_estimator("gigpo")):
        found = get_estimator(one, **({} if isinstance(one, partial) else {"potential_weight": 0.5}))
        assert (found.potential_weight, found.options) == (0.5, {})
    assert get_estimator("grpo", potential_weight=0.0) == get_estimator("grpo")
    with pytest.raises(ConfigError, match="potential_weight would have no effect on the estimator 'grpo'"):
        get_estimator("grpo", potential_weight=0.5)
    with pytest.raises(ConfigError, match="already applies potential-based shaping: omit potential_weight"):
        get_estimator(get_estimator(return_to_go, potential_weight=1.0), potential_weight=0.5)


def test_an_estimator_with_an_option_of_that_name_is_refused() -> None:
    def own(rollouts: Any, *, discount: float, scale: str, potential_weight: float = 0.0) -> Any:
        raise NotImplementedError

    with pytest.raises(
        ConfigError, match=r"'own' must not have an option named 'potential_weight', .* rename the option"
    ):
        get_estimator(own)
