"""Estimators against numbers worked out by hand, and against references that only loop."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_batches import (
    SCALES,
    Batch,
    assert_close,
    batches,
    discounts,
    final_rewards_by_loops,
    returns_by_loops,
    rollout,
    scales,
)

from agentsgym import ConfigError, ScoredRollout
from agentsgym.credit.advantages import (
    ESTIMATORS,
    Scale,
    gigpo,
    grpo,
    mt_grpo,
    return_to_go,
    reward,
    rloo,
    step_group_sizes,
    zero_variance_groups,
)
from agentsgym.credit.registry import get_estimator
from agentsgym.credit.returns import Baseline, discounted_returns

NEEDS_VALUES = ("turn_gae", "bilevel_gae")
ALL: dict[str, Any] = {name: estimator for name, estimator in ESTIMATORS.items() if name not in NEEDS_VALUES} | {
    "gigpo_others": partial(gigpo, baseline="others"),
    "return_to_go_batch": partial(return_to_go, baseline="batch"),
    "return_to_go_none": partial(return_to_go, baseline="none"),
    "return_to_go_role_ema": partial(return_to_go, baseline="role_ema"),
}
COMPARES_WITHIN_THE_BATCH = (
    "grpo",
    "rloo",
    "return_to_go",
    "return_to_go_batch",
    "rebn",
    "mt_grpo",
    "gigpo",
    "gigpo_others",
)
COMPARES_WITHIN_THE_TASK_GROUP = ("reward", "grpo", "rloo", "return_to_go", "mt_grpo")


# --- by hand ------------------------------------------------------------------------------------------------------


def test_discounted_returns_by_hand() -> None:
    assert discounted_returns([1.0, 2.0, 4.0], discount=0.5) == [3.0, 4.0, 4.0]
    assert discounted_returns([1.0, 2.0, 4.0], discount=1.0) == [7.0, 6.0, 4.0]
    assert discounted_returns([1.0, 2.0, 4.0], discount=0.0) == [1.0, 2.0, 4.0]
    assert discounted_returns([], discount=1.0) == []


@given(st.lists(st.floats(-10, 10), max_size=8), st.floats(0, 1))
def test_discounted_returns_are_the_sums_of_their_definition(rewards: list[float], discount: float) -> None:
    expected = [sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
    assert discounted_returns(rewards, discount=discount) == pytest.approx(expected, abs=1e-9)


def test_grpo_by_hand() -> None:
    rollouts = [rollout([0.0, 1.0]), rollout([0.0]), rollout([0.0, 0.0, 0.0]), rollout([3.0])]  # mean 1, std √2
    std = math.sqrt(2) + 1e-4
    assert grpo(rollouts) == [
        [0.0, 0.0],
        [pytest.approx(-1 / std)],
        [pytest.approx(-1 / std)] * 3,
        [pytest.approx(2 / std)],
    ]
    assert grpo(rollouts, scale="none") == [[0.0, 0.0], [-1.0], [-1.0, -1.0, -1.0], [2.0]]


def test_rloo_by_hand() -> None:
    rollouts = [rollout([0.0, 1.0]), rollout([0.0]), rollout([5.0])]
    assert rloo(rollouts, scale="none") == [[-1.5, -1.5], [-3.0], [4.5]]


def test_return_to_go_by_hand() -> None:
    rollouts = [rollout([1.0, 0.0, 4.0]), rollout([0.0, 2.0]), rollout([3.0])]
    # returns at a discount of .5: [2, 2, 4], [1, 2], [3]; the first is alone in turn 2
    assert return_to_go(rollouts, discount=0.5, scale="none") == [[0.0, 0.0, 4.0], [-1.5, 0.0], [1.5]]
    std = 1.0 + 1e-4
    expected = [[0.0, 0.0, 0.0], [-1.5 / std, 0.0], [1.5 / std]]
    assert return_to_go(rollouts, discount=0.5, scale="group") == expected


def test_gigpo_by_hand() -> None:
    rollouts = [rollout([0.0, 4.0], keys="sa"), rollout([1.0, 1.0], keys="ss"), rollout([0.0], keys=[None])]
    # final rewards 4, 2, 0; returns [4, 4], [2, 1], [0]; state s is met with 4, 2, 1: mean 7/3; a once
    steps = [[4 - 7 / 3, 0.0], [2 - 7 / 3, 1 - 7 / 3], [0.0]]
    expected = [[2 + steps[0][0], 2.0], [steps[1][0], steps[1][1]], [-2.0]]
    assert gigpo(rollouts, scale="none") == [pytest.approx(row) for row in expected]
    std_whole, std_step = 2 + 1e-4, math.sqrt(7 / 3) + 1e-4
    expected = [
        [2 / std_whole + steps[0][0] / std_step, 2 / std_whole],
        [steps[1][0] / std_step, steps[1][1] / std_step],
        [-2 / std_whole],
    ]
    assert gigpo(rollouts) == [pytest.approx(row) for row in expected]


def test_gigpo_that_leaves_the_rollout_out_by_hand() -> None:
    rollouts = [rollout([0.0, 4.0], keys="sa"), rollout([1.0, 1.0], keys="ss"), rollout([0.0], keys="s")]
    # whole: 4 - 1, 2 - 2, 0 - 3; state s: 4 against (2, 1, 0), (2, 1) against (4, 0), 0 against (4, 2, 1)
    expected = [[3 + 3, 3 + 4], [0 + 0, 0 - 1], [-3 - 7 / 3]]
    result = gigpo(rollouts, scale="none", baseline="others")
    assert result == [pytest.approx(row) for row in expected]


def test_batch_scale_divides_by_the_spread_over_all_groups() -> None:
    rollouts = [rollout([r], group=g) for g, r in [(0, 1.0), (0, 3.0), (1, 10.0), (1, 16.0)]]  # differences 1 and 3
    std = math.sqrt(20 / 3) + 1e-4
    assert grpo(rollouts, scale="batch") == [[pytest.approx(d / std)] for d in (-1, 1, -3, 3)]


def test_reward_is_what_each_turn_earned() -> None:
    assert reward([rollout([1.0, -2.0]), rollout([3.0], failed=True)]) == [[1.0, -2.0], [0.0]]


def test_the_final_reward_not_the_sum_of_turns_is_compared() -> None:
    rollouts = [rollout([5.0], final=1.0), rollout([7.0], final=3.0)]
    assert grpo(rollouts, scale="none") == [[-1.0], [1.0]]
    assert rloo(rollouts, scale="none") == [[-2.0], [2.0]]


# --- against loops ------------------------------------------------------------------------------------------------


@given(batches, scales)
def test_grpo_and_rloo_equal_the_loops(rollouts: Batch, scale: Scale) -> None:
    assert_close(grpo(rollouts, scale=scale), final_rewards_by_loops(rollouts, others=False, scale=scale))
    assert_close(rloo(rollouts, scale=scale), final_rewards_by_loops(rollouts, others=True, scale=scale))


@given(batches, scales, discounts)
def test_return_to_go_equals_the_loops(rollouts: Batch, scale: Scale, discount: float) -> None:
    expected = returns_by_loops(rollouts, lambda one, k: (one.group, k), discount=discount, others=True, scale=scale)
    assert_close(return_to_go(rollouts, discount=discount, scale=scale), expected)


@given(batches, scales, discounts, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["self", "others"]))
def test_gigpo_equals_the_loops(
    rollouts: Batch, scale: Scale, discount: float, weight: float, baseline: Baseline
) -> None:
    def key_of(one: ScoredRollout, k: int) -> Any:
        return None if one.state_keys[k] is None else (one.group, one.state_keys[k])

    others = baseline == "others"
    whole = final_rewards_by_loops(rollouts, others=others, scale=scale)
    steps = returns_by_loops(rollouts, key_of, discount=discount, others=others, scale=scale)
    expected = [[a + weight * b for a, b in zip(*pair, strict=True)] for pair in zip(whole, steps, strict=True)]
    result = gigpo(rollouts, discount=discount, scale=scale, step_weight=weight, baseline=baseline)
    assert_close(result, expected)


# --- what holds for all -------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(rollouts=batches, scale=scales, order=st.randoms(use_true_random=False))
def test_order_of_rollouts_and_names_of_groups_do_not_matter(
    rollouts: Batch, scale: Scale, order: random.Random
) -> None:
    places = list(range(len(rollouts)))
    order.shuffle(places)
    shuffled = [replace(rollouts[i], group=7 - 3 * rollouts[i].group) for i in places]
    for name, estimator in ALL.items():
        result = estimator(rollouts, discount=0.5, scale=scale)
        assert estimator(shuffled, discount=0.5, scale=scale) == [result[i] for i in places], name


@settings(max_examples=50)
@given(rollouts=batches, scale=scales)
def test_rollouts_that_do_not_count_get_zero_and_change_nothing(rollouts: Batch, scale: Scale) -> None:
    live = [i for i, one in enumerate(rollouts) if one.included]
    for name, estimator in ALL.items():
        result = estimator(rollouts, discount=1.0, scale=scale)
        assert [len(row) for row in result] == [len(one.turn_rewards) for one in rollouts], name
        assert all(not any(row) for row, one in zip(result, rollouts, strict=True) if not one.included), name
        assert estimator([rollouts[i] for i in live], discount=1.0, scale=scale) == [result[i] for i in live], name


@settings(max_examples=50)
@given(rollouts=batches, scale=st.sampled_from(["none", "group"]))
def test_a_task_group_does_not_see_the_others(rollouts: Batch, scale: Scale) -> None:
    own = [i for i, one in enumerate(rollouts) if one.group == 0]
    for name in COMPARES_WITHIN_THE_TASK_GROUP:
        result = ALL[name](rollouts, discount=1.0, scale=scale)
        assert ALL[name]([rollouts[i] for i in own], discount=1.0, scale=scale) == [result[i] for i in own], name


@settings(max_examples=50)
@given(rollouts=batches, scale=scales, constant=st.sampled_from([-2.0, 1.0, 16.0]))
def test_a_constant_on_the_last_turn_of_all_rollouts_changes_nothing(
    rollouts: Batch, scale: Scale, constant: float
) -> None:
    rollouts = [one for one in rollouts if one.turn_rewards]
    moved = [
        replace(
            one,
            turn_rewards=[*one.turn_rewards[:-1], one.turn_rewards[-1] + constant],
            final_reward=one.final_reward + constant,
        )
        for one in rollouts
    ]
    for name in ("grpo", "rebn", "mt_grpo", "gigpo"):  # the others have nothing to compare a lone turn with
        assert_close(ALL[name](moved, discount=1.0, scale=scale), ALL[name](rollouts, discount=1.0, scale=scale))
    twice = rollouts + rollouts
    for name in ("rloo", "return_to_go", "return_to_go_batch", "gigpo_others"):
        result = ALL[name](moved + moved, discount=1.0, scale=scale)
        assert_close(result, ALL[name](twice, discount=1.0, scale=scale))


@settings(max_examples=50)
@given(rollouts=batches, factor=st.sampled_from([0.5, 2.0, 8.0]))
def test_advantages_scale_with_the_rewards_where_nothing_divides_them(rollouts: Batch, factor: float) -> None:
    larger = [
        replace(
            one, turn_rewards=[factor * earned for earned in one.turn_rewards], final_reward=factor * one.final_reward
        )
        for one in rollouts
    ]
    for estimator in ALL.values():
        expected = [[factor * number for number in row] for row in estimator(rollouts, discount=0.5, scale="none")]
        assert_close(estimator(larger, discount=0.5, scale="none"), expected)


def test_equal_states_of_different_tasks_are_different_problems() -> None:
    rollouts = [rollout([earned], group=earned, keys="s") for earned in (0, 1)]
    assert gigpo(rollouts, scale="none") == [[0.0], [0.0]]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", COMPARES_WITHIN_THE_BATCH)
@pytest.mark.parametrize(
    "finals",
    [(1.0, 1.0, 1.0), (0.1 + 0.2, 0.3, 0.3), (1.0, 1.00000006, 0.99999994), (3e8, 3e8 + 32.0), (1e-16, 0.0, -1e-16)],
)
def test_equal_rewards_give_exactly_zero(name: str, scale: Scale, finals: tuple[float, ...]) -> None:
    rollouts = [rollout([final], keys="s") for final in finals]
    assert ALL[name](rollouts, discount=1.0, scale=scale) == [[0.0]] * len(finals)


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("grpo", "none", 0.0),
        ("grpo", "group", 0.0),
        ("grpo", "batch", 0.0),
        ("rloo", "none", 3.0),  # the baseline is 0
        ("rloo", "group", 0.0),  # there is no spread
        ("rloo", "batch", 3.0 / 3.0001),
        ("return_to_go", "none", 3.0),
        ("return_to_go", "group", 0.0),
        ("return_to_go", "batch", 3.0 / 3.0001),
        ("gigpo", "none", 0.0),
        ("gigpo", "group", 0.0),
        ("gigpo", "batch", 0.0),
        ("gigpo_others", "none", 6.0),
        ("gigpo_others", "group", 0.0),
        ("gigpo_others", "batch", 6.0 / 3.0001),
    ],
)
def test_a_group_of_one_is_finite(name: str, scale: Scale, expected: float) -> None:
    assert ALL[name]([rollout([3.0], keys="s")], discount=1.0, scale=scale) == [[pytest.approx(expected)]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", SCALES)
def test_nothing_to_compare_is_no_error(name: str, scale: Scale) -> None:
    assert ALL[name]([], discount=1.0, scale=scale) == []
    assert ALL[name]([rollout([])], discount=1.0, scale=scale) == [[]]
    assert ALL[name]([rollout([1.0], failed=True)], discount=1.0, scale=scale) == [[0.0]]


@given(batches, scales)
def test_gigpo_without_states_or_weight_is_grpo(rollouts: Batch, scale: Scale) -> None:
    no_keys = [replace(one, state_keys=[None] * len(one.turn_rewards)) for one in rollouts]
    assert gigpo(no_keys, scale=scale) == grpo(rollouts, scale=scale)
    assert gigpo(rollouts, scale=scale, step_weight=0.0) == grpo(rollouts, scale=scale)


@given(batches)
def test_rloo_is_grpo_times_the_bessel_factor(rollouts: Batch) -> None:
    sizes = [sum(other.group == one.group and other.included for other in rollouts) for one in rollouts]
    centered = grpo(rollouts, scale="none")
    for one, size, row, expected in zip(rollouts, sizes, rloo(rollouts, scale="none"), centered, strict=True):
        if size > 1 and one.included:
            assert row == pytest.approx([number * size / (size - 1) for number in expected])


# --- the rest -----------------------------------------------------------------------------------------------------


def test_zero_variance_groups_by_hand() -> None:
    rollouts = [rollout([final], group=group) for group, final in [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.5)]]
    broken = [rollout([0.0], group=1, failed=True), rollout([0.0], group=3, failed=True)]
    assert zero_variance_groups(rollouts + broken) == {1, 2}
    assert zero_variance_groups(broken) == set()


@given(batches)
def test_zero_variance_groups_are_those_that_grpo_learns_nothing_from(rollouts: Batch) -> None:
    with_turn = [replace(one, turn_rewards=[0.0], state_keys=[None], roles=[], potentials=[]) for one in rollouts]
    live = {one.group for one in rollouts if one.included}
    heard = {one.group for one, row in zip(with_turn, grpo(with_turn), strict=True) if any(row)}
    assert zero_variance_groups(rollouts) == live - heard


@given(batches)
def test_step_groups_are_the_turns_that_share_task_and_state(rollouts: Batch) -> None:
    keys = [(one.group, key) for one in rollouts if one.included for key in one.state_keys if key is not None]
    assert step_group_sizes(rollouts) == [keys.count(key) for key in dict.fromkeys(keys)]


def test_the_unbiased_form_of_mt_grpo_is_gigpo_over_turn_indices_and_mt_grpo_is_grpo_where_only_wins_count() -> None:
    ends = [[1.0], [0.0, 0.0, 0.0], [0.0, 0.5], [0.0, 0.0, 0.0, 2.0]]
    batch = [rollout(rewards, keys=range(len(rewards))) for rewards in ends]
    turns = zip(rloo(batch, scale="none"), return_to_go(batch, scale="none"), strict=True)
    expected = [[r + 0.5 * g for r, g in zip(one, other, strict=True)] for one, other in turns]
    assert_close(gigpo(batch, scale="none", baseline="others", step_weight=0.5), expected)
    assert mt_grpo(batch) == grpo(batch)


def test_unknown_names_are_refused() -> None:
    for estimator in ("grpo", "rae", "turn_gae"):
        with pytest.raises(ConfigError, match=r"^scale cannot be 'groups'; did you mean 'group'\?"):
            get_estimator(estimator)([], discount=1.0, scale="groups")
    with pytest.raises(ConfigError, match=r"baseline cannot be 'other'; did you mean 'others'\?"):
        gigpo([rollout([1.0])], baseline="other")
