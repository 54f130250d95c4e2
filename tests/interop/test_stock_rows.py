"""How rollouts become the rows of a stock trainer, and what TRL's own arithmetic makes of them."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.interop.rows import agent_positions, averaged_exactly, group_rows, whole_row
from agentsgym.types import StopReason, Trajectory, Turn


def played(lengths: list[int], **values: Any) -> Trajectory:
    """A prompt of two tokens, then turns of these lengths with one token of the environment between them."""
    turns: list[Turn] = []
    place = 2
    for length in lengths:
        turns.append(Turn(start=place, stop=place + length, reward=1.0))
        place += length + 1
    size = place if lengths else 2
    values = {"final_reward": 3.0, "stop_reason": StopReason.DONE, "logprobs": [-0.5] * size} | values
    return Trajectory(token_ids=list(range(100, 100 + size)), turns=turns, messages=[], **values)


def on_tokens(trajectory: Trajectory, numbers: list[float]) -> list[float]:
    """One number a turn, on its tokens."""
    row = [0.0] * len(trajectory.token_ids)
    for turn, number in zip(trajectory.turns, numbers, strict=True):
        row[turn.start : turn.stop] = [number] * (turn.stop - turn.start)
    return row


rollouts = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])), max_size=5),
    min_size=1,
    max_size=4,
)


@given(rollouts, st.integers(0, 12))
def test_trl_gives_every_token_of_a_group_its_own_advantage_or_the_mean_of_what_was_joined(
    group: list[list[tuple[int, float]]], spare: int
) -> None:
    trajectories = [played([length for length, _ in turns]) for turns in group]
    advantages = [on_tokens(one, [value for _, value in turns]) for one, turns in zip(trajectories, group, strict=True)]
    num_rows = len(group) + 1 + spare
    rows, num_joined = group_rows(trajectories, advantages, [True] * len(group), num_rows)
    assert len(rows) == num_rows
    rewards = [row.reward or 0.0 for row in rows]
    assert fmean(rewards) == pytest.approx(0, abs=1e-12)  # so that TRL's baseline subtracts nothing
    for trajectory, own in zip(trajectories, advantages, strict=True):
        parts = [row for row in rows if row.rollout is trajectory]
        assert sorted(place for row in parts for place in row.positions) == agent_positions(trajectory)
        assert sum(row.is_first for row in parts) == 1
        for row in parts:
            if row.positions:
                assert row.reward == pytest.approx(fmean(own[place] for place in row.positions))
                assert num_joined or len({own[place] for place in row.positions}) == 1
    num_values = sum(len({value for _, value in turns}) or 1 for turns in group)
    assert num_joined == max(0, num_values - (num_rows - 1))


def test_with_one_row_a_rollout_all_its_turns_share_their_mean_over_tokens() -> None:
    one, other = played([3, 1]), played([1])
    rows, num_joined = group_rows(
        [one, other], [on_tokens(one, [1.0, -1.0]), on_tokens(other, [0.25])], [True, True], 3
    )
    assert num_joined == 1
    assert [row.reward for row in rows] == [0.5, 0.25, -0.75]
    assert [row.columns(0)["env_mask"] for row in rows] == [[1, 1, 1, 0, 1], [1], [0]]


def test_a_row_of_a_part_of_a_rollout_ends_with_the_last_token_that_it_trains() -> None:
    one = played([2, 1, 2])
    rows, _ = group_rows([one], [on_tokens(one, [0.5, -1.0, 0.5])], [True], 4)
    first, second = (row.columns(0) for row in rows[:2])
    assert first["completion_ids"] == [102, 103, 104, 105]
    assert first["env_mask"] == first["action_mask"] == [0, 0, 0, 1]
    assert first["row_reward"] == -1.0
    assert second["completion_ids"] == list(one.token_ids[2:9])
    assert second["env_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert {len(second[name]) for name in ("completion_ids", "logprobs", "env_mask", "advantages")} == {7}


def test_a_rollout_that_failed_trains_nothing_and_is_compared_with_nothing() -> None:
    failed = played([2], stop_reason=StopReason.FAILED, final_reward=0.0)
    columns = whole_row(failed, [0.0] * len(failed.token_ids), included=False).columns(0)
    assert columns["row_reward"] is None
    assert columns["env_mask"] == [0, 0]
    rows, _ = group_rows([failed, played([1])], [[0.0] * 5, [0.0, 0.0, 1.0, 0.0]], [False, True], 4)
    assert [row.reward for row in rows] == [1.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize("empty", [played([]), played([], logprobs=None)])
def test_a_rollout_without_a_turn_still_is_a_row_that_trl_can_read(empty: Trajectory) -> None:
    columns = whole_row(empty, [0.0, 0.0], included=True).columns(7)
    assert (columns["prompt_ids"], columns["completion_ids"], columns["env_mask"]) == ([7], [7], [0])
    assert columns["row_reward"] == 3.0


def test_the_first_token_of_a_row_has_no_context_and_is_not_trained() -> None:
    bare = Trajectory(
        token_ids=[5, 6], turns=[Turn(start=0, stop=2, reward=0.0)], messages=[], final_reward=0.0,
        stop_reason=StopReason.DONE,
    )  # fmt: skip
    assert whole_row(bare, [1.0, 1.0], included=True).columns(7)["env_mask"] == [0, 1]


@given(st.floats(-1e6, 1e6), st.integers(2, 256))
def test_equal_rewards_have_no_spread_in_trls_own_arithmetic(reward: float, group: int) -> None:
    rounded = averaged_exactly(reward)
    assert rounded == pytest.approx(reward, rel=2e-5)
    rewards = torch.tensor([rounded] * group)
    assert torch.equal(rewards.mean(), rewards[0])
    assert float((rewards - torch.nanmean(rewards)).abs().max()) == 0.0
