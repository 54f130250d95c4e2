"""Filters: what a budget ended is penalized or masked, and whole task groups are found and dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_batches import Batch, batches, rollout

from agentsgym.credit.assignment import AdvantageAssigner, filter_rollouts, uninformative_task_groups
from agentsgym.credit.settings import CreditSettings

PLAIN, CUT = rollout([0.5, 1.0]), replace(rollout([0.5, 1.0]), truncated=True)


def filtered(rollouts: Batch, **changes: Any) -> Batch:
    return filter_rollouts(rollouts, CreditSettings(**changes))[0]


@pytest.mark.parametrize("penalty", [1.0, 0.25])
def test_a_penalty_comes_off_the_last_turn_and_the_final_reward_of_truncated_rollouts(penalty: float) -> None:
    penalized = replace(CUT, turn_rewards=[0.5, 1.0 - penalty], final_reward=1.5 - penalty)
    assert filtered([PLAIN, CUT], truncation="penalize", truncation_penalty=penalty) == [PLAIN, penalized]


def test_a_rollout_without_turns_is_penalized_in_its_final_reward() -> None:
    [penalized] = filtered([replace(rollout([]), truncated=True)], truncation="penalize", truncation_penalty=1.0)
    assert (penalized.turn_rewards, penalized.final_reward) == ([], -1.0)


def test_masking_drops_truncated_rollouts_and_changes_nothing_else() -> None:
    failed = replace(PLAIN, failed=True)
    found = AdvantageAssigner(CreditSettings(truncation="mask")).estimate([PLAIN, CUT, failed], is_training=True)
    assert found.seen == [PLAIN, CUT, failed]  # whose baselines hold it
    assert found.trained == [PLAIN, replace(CUT, dropped=True), failed]


def test_small_groups_and_those_of_one_reward_are_uninformative() -> None:
    rollouts = [
        *(rollout([reward], group=0) for reward in (1.0, 0.0, 0.0)),
        *(rollout([0.5], group=1), rollout([0.7, -0.2], group=1), rollout([9.0], group=1, failed=True)),
        *(rollout([0.0], group=2), rollout([1.0], group=2, failed=True)),
        rollout([1.0], group=3, failed=True),
    ]
    found = {
        (size, treatment): uninformative_task_groups(
            rollouts, CreditSettings(min_group_size=size, zero_variance_groups=treatment)
        )
        for size in (1, 2, 3)
        for treatment in ("keep", "drop")
    }
    assert found == {
        (1, "keep"): {3},  # nothing of it is included
        (2, "keep"): {2, 3},
        (3, "keep"): {1, 2, 3},
        (1, "drop"): {1, 2, 3},
        (2, "drop"): {1, 2, 3},
        (3, "drop"): {1, 2, 3},
    }


settings = st.builds(
    CreditSettings, min_group_size=st.integers(1, 3), zero_variance_groups=st.sampled_from(["keep", "drop"])
)


@given(batches, settings)
def test_whole_groups_are_dropped_and_nothing_else_changes(rollouts: Batch, args: CreditSettings) -> None:
    groups = uninformative_task_groups(rollouts, args)
    expected = [replace(one, dropped=one.dropped or one.group in groups) for one in rollouts]
    assert filter_rollouts(rollouts, args)[0] == expected


@given(batches, settings)
def test_what_is_left_after_dropping_is_informative(rollouts: Batch, args: CreditSettings) -> None:
    for group in {one.group for one in rollouts} - uninformative_task_groups(rollouts, args):
        rewards = [one.final_reward for one in rollouts if one.included and one.group == group]
        assert len(rewards) >= args.min_group_size
        assert args.zero_variance_groups == "keep" or len(set(rewards)) > 1
