"""The ways in and out of the estimators: trajectory to scored rollout, numbers to tokens."""

from __future__ import annotations

from typing import Any

import pytest

from agentsgym.credit.advantages import ScoredRollout, get_estimator, grpo, return_to_go, reward, token_advantages
from agentsgym.credit.rewards import scatter_to_tokens
from agentsgym.types import StopReason, Trajectory, Turn


def trajectory(
    *, stop_reason: StopReason = StopReason.DONE, per_token_rewards: tuple[float, ...] = (0.0, 0.5, 0.5, 0.0, 2.0)
) -> Trajectory:  # the picture .AA.B
    turns = [
        Turn(start=1, stop=3, reward=1.0, state_key="s", role="white", potential=-1.0),
        Turn(start=4, stop=5, reward=2.0, invalid=True),
    ]
    return Trajectory(
        token_ids=range(5),
        turns=turns,
        messages=[],
        final_reward=4.0,
        stop_reason=stop_reason,
        per_token_rewards=per_token_rewards,
    )


def test_scatter_to_tokens_puts_the_whole_number_on_each_token_of_the_turn() -> None:
    assert scatter_to_tokens(trajectory(), [3.0, -1.0]) == [0.0, 3.0, 3.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="2 turns, got 1"):
        scatter_to_tokens(trajectory(), [3.0])


def test_a_turn_may_have_one_number_for_each_of_its_tokens() -> None:
    assert scatter_to_tokens(trajectory(), [[3.0, 2.0], [-1.0]]) == [0.0, 3.0, 2.0, 0.0, -1.0]
    assert scatter_to_tokens(trajectory(), [[3.0, 2.0], -1.0]) == [0.0, 3.0, 2.0, 0.0, -1.0]
    for wrong in ([3.0], [3.0, 2.0, 1.0], []):
        with pytest.raises(ValueError, match=rf"the list of advantages for turn 0 must .* \(2\), got {len(wrong)}"):
            scatter_to_tokens(trajectory(), [wrong, -1.0], name="advantage")


def test_a_turn_without_tokens_has_no_place_for_a_number() -> None:
    silent = Trajectory(
        token_ids=[0],
        turns=[Turn(start=1, stop=1, reward=1.0)],
        messages=[],
        final_reward=1.0,
        stop_reason=StopReason.DONE,
    )
    assert scatter_to_tokens(silent, [3.0]) == scatter_to_tokens(silent, [[]]) == [0.0]


def test_token_advantages_expand_every_estimator_but_reward() -> None:
    assert token_advantages(trajectory(), [3.0, -1.0], estimator=grpo) == [0.0, 3.0, 3.0, 0.0, -1.0]
    assert token_advantages(trajectory(), [3.0, -1.0], estimator=reward) == [0.0, 0.5, 0.5, 0.0, 2.0]
    bound, wrapped = get_estimator("reward"), get_estimator(return_to_go, potential_weight=1.0)
    assert token_advantages(trajectory(), [3.0, -1.0], estimator=bound) == [0.0, 0.5, 0.5, 0.0, 2.0]
    assert token_advantages(trajectory(), [3.0, -1.0], estimator=wrapped) == [0.0, 3.0, 3.0, 0.0, -1.0]


def test_reward_gives_a_failed_rollout_nothing() -> None:
    failed = trajectory(stop_reason=StopReason.FAILED)
    assert token_advantages(failed, [0.0, 0.0], estimator=reward) == [0.0] * 5
    assert token_advantages(trajectory(per_token_rewards=()), [1.0, 2.0], estimator=reward) == [0.0] * 5


def test_a_scored_rollout_holds_what_the_trajectory_states() -> None:
    scored = ScoredRollout.from_trajectory(trajectory(), group=3, environment="chess")
    assert scored == ScoredRollout(
        turn_rewards=[1.0, 2.0],
        final_reward=4.0,
        group=3,
        state_keys=["s", None],
        environment="chess",
        roles=["white", None],
        potentials=[-1.0, None],
        token_counts=[2, 1],
        invalid=[False, True],
    )
    assert (scored.included, scored.role(0), scored.role(1)) == (True, "white", None)
    final = ScoredRollout.from_trajectory(trajectory(stop_reason=StopReason.FAILED), group=3, turn_credit="final")
    assert final.turn_rewards == [0.0, 4.0]
    assert final.failed
    assert not final.included


def test_a_scored_rollout_needs_a_key_for_each_turn() -> None:
    with pytest.raises(ValueError, match="got 1 rewards and 0 state keys"):
        ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[])


@pytest.mark.parametrize("name", ["roles", "potentials", "values", "token_counts", "invalid"])
def test_what_a_scored_rollout_may_leave_out_has_an_entry_a_turn_if_it_is_there(name: str) -> None:
    plain = ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None])
    assert not getattr(plain, name)
    assert plain.role(0) is None
    given: Any = [[0.0]] * 2 if name == "values" else [0.0] * 2
    with pytest.raises(ValueError, match=f"{name} must be empty or have one entry per turn, got 2 for 1"):
        ScoredRollout(turn_rewards=[1.0], final_reward=1.0, group=0, state_keys=[None], **{name: given})


@pytest.mark.parametrize("reason", StopReason)
def test_a_scored_rollout_reports_whether_a_budget_ended_it(reason: StopReason) -> None:
    scored = ScoredRollout.from_trajectory(trajectory(stop_reason=reason), group=0)
    assert scored.truncated == (reason in {StopReason.MAX_TURNS, StopReason.MAX_TOKENS})


def test_environment_tokens_get_the_fill() -> None:
    assert scatter_to_tokens(trajectory(), [[3.0, 2.0], -1.0], fill=9.0) == [9.0, 3.0, 2.0, 9.0, -1.0]


def test_advantages_that_do_not_fit_are_refused_by_that_name() -> None:
    with pytest.raises(ValueError, match="expected one advantage per turn: 2 turns, got 1"):
        token_advantages(trajectory(), [3.0], estimator=grpo)
    with pytest.raises(ValueError, match=r"the list of advantages for turn 0 must .* \(2\), got 1"):
        token_advantages(trajectory(), [[3.0], 1.0], estimator=grpo)
