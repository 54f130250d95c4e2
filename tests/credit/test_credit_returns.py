"""Baselines, ReBN, MT-GRPO and shaping by potentials: by hand, and against references that only loop."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import (
    Batch,
    assert_close,
    batches,
    compared_by_loops,
    discounts,
    final_rewards_by_loops,
    held_against_by_loops,
    placed,
    returns_by_loops,
    returns_of,
    rollout,
    scales,
)

from agentsgym.credit.advantages import Scale, ScoredRollout, get_estimator, grpo, mt_grpo, rebn, return_to_go, rloo
from agentsgym.credit.bound import shaped
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.returns import discounted_returns
from agentsgym.errors import ConfigError

# --- by hand ------------------------------------------------------------------------------------------------------


def test_no_baseline_by_hand() -> None:
    rollouts = [rollout([1.0, 3.0]), rollout([2.0], environment="go")]
    assert return_to_go(rollouts, scale="none", baseline="none") == [[4.0, 3.0], [2.0]]
    spread = math.sqrt(16 + 9) + 1e-4  # of one game, about 0
    expected = [[4 / spread, 3 / spread], [2 / 2.0001]]
    assert_close(return_to_go(rollouts, baseline="none"), expected)
    spread = math.sqrt((16 + 9 + 4) / 2) + 1e-4
    assert_close(return_to_go(rollouts, scale="batch", baseline="none"), [[4 / spread, 3 / spread], [2 / spread]])
    seated = [rollout([4.0], roles=["left"]), rollout([3.0], roles=["right"]), rollout([2.0], roles=["left"])]
    spread = math.sqrt(16 + 4) + 1e-4  # of one role
    assert_close(return_to_go(seated, baseline="none"), [[4 / spread], [3 / 3.0001], [2 / spread]])


def test_the_batch_as_baseline_by_hand() -> None:
    rollouts = [
        rollout([1.0, 3.0]),
        rollout([2.0], group=1),
        rollout([6.0, 0.0], group=1),
        rollout([9.0], environment="go"),
    ]
    # returns [4, 3], [2], [6, 0]: against the mean of 2, 6, 0, of 4, 3, 6, 0 and of 4, 3, 2; nobody else plays go
    expected = [[4 - 8 / 3, 3 - 8 / 3], [2 - 13 / 4], [6 - 3, 0 - 3], [9.0]]
    assert_close(return_to_go(rollouts, scale="none", baseline="batch"), expected)
    assert return_to_go(rollouts, scale="group", baseline="batch")[3] == [0.0]


def test_role_averages_by_hand() -> None:
    state = EMABaselines()
    rollouts = [rollout([4.0], roles="a"), rollout([3.0], roles="b"), rollout([2.0], roles="a")]
    first = return_to_go(rollouts, scale="none", baseline="role_ema", decay=0.5, state=state)
    assert first == [[4.0], [3.0], [2.0]]  # nothing is known yet
    assert [state.get((None, role)) for role in "ab"] == [1.5, 1.5]  # half the means 3 and 3
    second = return_to_go(rollouts, scale="none", baseline="role_ema", decay=0.5, state=state)
    assert second == [[2.5], [1.5], [0.5]]
    assert [state.get((None, role)) for role in "ab"] == [2.25, 2.25]


def test_rebn_by_hand() -> None:
    rollouts = [
        rollout([0.0, 4.0]),
        rollout([1.0], group=1),
        rollout([5.0], environment="go"),
    ]  # returns 4, 4, 1; mean 3
    assert rebn(rollouts, scale="none") == [[1.0, 1.0], [-2.0], [0.0]]
    spread = math.sqrt(3) + 1e-4
    assert_close(rebn(rollouts), [[1 / spread, 1 / spread], [-2 / spread], [0.0]])
    assert rebn(rollouts, discount=0.5, scale="none") == [[2 - 7 / 3, 4 - 7 / 3], [1 - 7 / 3], [0.0]]


def test_mt_grpo_by_hand() -> None:
    rollouts = [rollout([1.0, 2.0, 0.0], final=4.0), rollout([3.0, 7.0], final=0.0), rollout([8.0], final=2.0)]
    # outcomes 2, -2, 0; in turn 0 the first two went on: 1 and 3; in turn 1 the first alone
    assert mt_grpo(rollouts, scale="none") == [[1.0, 2.0, 2.0], [-1.0, -2.0], [0.0]]
    assert mt_grpo(rollouts, scale="none", turn_weight=3.0) == [[-1.0, 2.0, 2.0], [1.0, -2.0], [0.0]]
    outcome, turn = 2 + 1e-4, math.sqrt(2) + 1e-4
    expected = [[2 / outcome - 1 / turn, 2 / outcome, 2 / outcome], [1 / turn - 2 / outcome, -2 / outcome], [0.0]]
    assert_close(mt_grpo(rollouts), expected)


def test_with_two_turns_mt_grpo_is_the_form_of_the_paper() -> None:
    rollouts = [rollout([earned, 0.0], final=final) for earned, final in [(0.2, 1.0), (0.0, 0.0), (0.2, 0.0)]]
    outcome = [row[0] for row in grpo(rollouts)]
    turn = [row[0] for row in grpo([rollout([earned]) for earned in (0.2, 0.0, 0.2)])]
    assert_close(mt_grpo(rollouts), [[a + b, a] for a, b in zip(outcome, turn, strict=True)])


def test_what_earns_at_once_outweighs_what_it_costs_where_only_the_turn_is_looked_at() -> None:
    bait, patience = rollout([0.3, 0.0]), rollout([0.0, 1.0])
    for turn_weight, sign in ((1.0, 0.0), (2.0, 1.0)):
        (first, _), (other, _) = mt_grpo([bait, patience], turn_weight=turn_weight)
        assert [first, other] == pytest.approx([sign * 0.7071, -sign * 0.7071], abs=1e-3)
    (first, _), (other, _) = return_to_go([bait, patience])
    assert first < 0 < other


# --- against loops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "others"), [(partial(return_to_go, baseline="batch"), True), (rebn, False)])
@given(rollouts=batches, scale=scales, discount=discounts)
def test_baselines_of_the_batch_equal_the_loops(
    estimator: Any, others: bool, rollouts: Batch, scale: Scale, discount: float
) -> None:
    expected = returns_by_loops(rollouts, lambda one, k: one.environment, discount=discount, others=others, scale=scale)
    assert_close(estimator(rollouts, discount=discount, scale=scale), expected)


@given(batches, scales, discounts)
def test_no_baseline_equals_the_loops(rollouts: Batch, scale: Scale, discount: float) -> None:
    entries, places = returns_of(rollouts, lambda one, k: (one.environment, one.role(k)), discount=discount)
    expected = placed(rollouts, places, held_against_by_loops(entries, lambda group: 0.0, scale=scale))
    assert_close(return_to_go(rollouts, discount=discount, scale=scale, baseline="none"), expected)


@given(st.lists(batches, max_size=3), scales, discounts, st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_role_averages_equal_the_loops(played: list[Batch], scale: Scale, discount: float, decay: float) -> None:
    state, averages = EMABaselines(), {}
    for rollouts in played:
        entries, places = returns_of(rollouts, lambda one, k: (one.environment, one.roles[k]), discount=discount)
        numbers = held_against_by_loops(entries, lambda key: averages.get(key, 0.0), scale=scale)
        result = return_to_go(rollouts, discount=discount, scale=scale, baseline="role_ema", decay=decay, state=state)
        assert_close(result, placed(rollouts, places, numbers))
        for key in {key for _, _, key in entries}:
            values = [value for value, _, other in entries if other == key]
            averages[key] = decay * averages.get(key, 0.0) + (1 - decay) * sum(values) / len(values)
            assert state.get(key) == pytest.approx(averages[key])


@given(batches, scales, st.sampled_from([0.0, 0.5, 1.0]))
def test_mt_grpo_equals_the_loops(rollouts: Batch, scale: Scale, weight: float) -> None:
    places = [
        (i, k)
        for i, one in enumerate(rollouts)
        if one.included
        for k in range(len(one.turn_rewards))
        if k + 1 < len(one.turn_rewards)
    ]
    entries = [(rollouts[i].turn_rewards[k], i, (rollouts[i].group, k)) for i, k in places]
    turns = placed(rollouts, places, compared_by_loops(entries, others=False, scale=scale))
    whole = final_rewards_by_loops(rollouts, others=False, scale=scale)
    expected = [[a + weight * b for a, b in zip(*pair, strict=True)] for pair in zip(whole, turns, strict=True)]
    assert_close(mt_grpo(rollouts, scale=scale, turn_weight=weight), expected)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"baseline cannot be 'other'; did you mean 'others'\?"):
        return_to_go([], baseline="other")
    with pytest.raises(ConfigError, match=r"decay must be a number in \[0, 1\], got 1.5"):
        return_to_go([], baseline="role_ema", decay=1.5)
    for baseline in ("none", "batch", "others"):
        message = f"^decay can be set only with baseline='role_ema', got decay=0.5 with baseline='{baseline}'$"
        with pytest.raises(ConfigError, match=message):
            return_to_go([], baseline=baseline, decay=0.5)
        with pytest.raises(ConfigError, match=message):
            get_estimator("return_to_go", baseline=baseline, decay=0.5)
    with pytest.raises(ConfigError, match="turn_weight must be a finite number >= 0, got '1'"):
        mt_grpo([], turn_weight="1")
    with pytest.raises(ConfigError, match="turn_weight must be a finite number >= 0, got nan"):
        mt_grpo([], turn_weight=math.nan)


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
