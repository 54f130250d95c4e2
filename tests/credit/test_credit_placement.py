"""The ways in and out of the estimators: trajectory to scored rollout, name to function, numbers to tokens."""

from __future__ import annotations

from functools import partial

import pytest

from agentsgym.credit.advantages import (
    ESTIMATORS,
    ScoredRollout,
    expand_to_tokens,
    get_estimator,
    gigpo,
    grpo,
    reward,
    token_advantages,
)
from agentsgym.types import StopReason, Trajectory, Turn


def trajectory(
    *,
    stop_reason: StopReason = StopReason.DONE,
    per_token_rewards: tuple[float, ...] = (0.0, 0.5, 0.5, 0.0, 2.0),
) -> Trajectory:  # the picture .AA.B
    turns = [Turn(start=1, stop=3, reward=1.0, state_key="s"), Turn(start=4, stop=5, reward=2.0)]
    return Trajectory(
        token_ids=range(5),
        turns=turns,
        messages=[],
        final_reward=4.0,
        stop_reason=stop_reason,
        per_token_rewards=per_token_rewards,
    )


def test_expand_to_tokens_puts_the_whole_number_on_each_token_of_the_turn() -> None:
    assert expand_to_tokens(trajectory(), [3.0, -1.0]) == [0.0, 3.0, 3.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="2 turns, got 1"):
        expand_to_tokens(trajectory(), [3.0])


def test_token_advantages_expand_every_estimator_but_reward() -> None:
    assert token_advantages(trajectory(), [3.0, -1.0], estimator=grpo) == [0.0, 3.0, 3.0, 0.0, -1.0]
    assert token_advantages(trajectory(), [3.0, -1.0], estimator=reward) == [0.0, 0.5, 0.5, 0.0, 2.0]


def test_reward_gives_a_failed_rollout_nothing() -> None:
    failed = trajectory(stop_reason=StopReason.FAILED)
    assert token_advantages(failed, [0.0, 0.0], estimator=reward) == [0.0] * 5
    assert token_advantages(trajectory(per_token_rewards=()), [1.0, 2.0], estimator=reward) == [0.0] * 5


def test_a_scored_rollout_holds_what_the_trajectory_says() -> None:
    scored = ScoredRollout.from_trajectory(trajectory(), group=3)
    assert scored == ScoredRollout(turn_rewards=[1.0, 2.0], final_reward=4.0, group=3, state_keys=["s", None])
    final = ScoredRollout.from_trajectory(trajectory(stop_reason=StopReason.FAILED), group=3, turn_credit="final")
    assert final.turn_rewards == [0.0, 4.0]
    assert final.failed


def test_a_scored_rollout_needs_a_key_for_each_turn() -> None:
    with pytest.raises(ValueError, match="got 1 and 0"):
        ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_are_found_by_name(name: str) -> None:
    assert get_estimator(name) is ESTIMATORS[name]
    assert get_estimator(name).__name__ == name


def test_a_callable_is_taken_as_it_is() -> None:
    mine = partial(gigpo, baseline="others")
    assert get_estimator(mine) is mine
