"""Filters: what a budget ended is penalized or masked, and whole task groups are found and dropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import Batch, batches, rollout

from agentsgym.credit.filters import drop_groups, mask_truncated, penalize_truncated, uninformative_groups

PLAIN, CUT = rollout([0.5, 1.0]), replace(rollout([0.5, 1.0]), truncated=True)


@pytest.mark.parametrize("penalty", [1.0, 0.25])
def test_a_penalty_comes_off_the_last_turn_and_the_final_reward_of_truncated_rollouts(penalty: float) -> None:
    penalized = replace(CUT, turn_rewards=[0.5, 1.0 - penalty], final_reward=1.5 - penalty)
    assert penalize_truncated([PLAIN, CUT], penalty) == [PLAIN, penalized]


def test_a_rollout_without_turns_is_penalized_in_its_final_reward() -> None:
    [penalized] = penalize_truncated([replace(rollout([]), truncated=True)], 1.0)
    assert (penalized.turn_rewards, penalized.final_reward) == ([], -1.0)


def test_masking_drops_truncated_rollouts_and_changes_nothing_else() -> None:
    dropped = replace(PLAIN, dropped=True)
    assert mask_truncated([PLAIN, CUT, dropped]) == [PLAIN, replace(CUT, dropped=True), dropped]


def test_small_groups_and_those_of_one_reward_are_uninformative() -> None:
    rollouts = [
        *(rollout([reward], group=0) for reward in (1.0, 0.0, 0.0)),
        *(rollout([0.5], group=1), rollout([0.7, -0.2], group=1), rollout([9.0], group=1, failed=True)),
        *(rollout([0.0], group=2), rollout([1.0], group=2, failed=True)),
        rollout([1.0], group=3, failed=True),
    ]
    found = {
        (size, drop): uninformative_groups(rollouts, min_group_size=size, drop_zero_variance=drop)
        for size in (1, 2, 3)
        for drop in (False, True)
    }
    assert found == {
        (1, False): {3},  # nothing of it is included
        (2, False): {2, 3},
        (3, False): {1, 2, 3},
        (1, True): {1, 2, 3},
        (2, True): {1, 2, 3},
        (3, True): {1, 2, 3},
    }


@given(batches, st.sets(st.integers(0, 3)))
def test_whole_groups_are_dropped_and_nothing_else_changes(rollouts: Batch, groups: set[int]) -> None:
    expected = [replace(one, dropped=one.dropped or one.group in groups) for one in rollouts]
    assert drop_groups(rollouts, groups) == expected


@given(batches, st.integers(1, 3), st.booleans())
def test_what_is_left_after_dropping_is_informative(rollouts: Batch, size: int, drop_zero_variance: bool) -> None:
    found = uninformative_groups(rollouts, min_group_size=size, drop_zero_variance=drop_zero_variance)
    for group in {one.group for one in rollouts} - found:
        rewards = [one.final_reward for one in rollouts if one.included and one.group == group]
        assert len(rewards) >= size
        assert not drop_zero_variance or len(set(rewards)) > 1
