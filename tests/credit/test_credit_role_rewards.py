"""What each role is given lies on its own turns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.credit.components import attribute_rewards, reward_mismatch
from agentsgym.credit.rewards import credited_rewards, per_token_rewards
from agentsgym.types import StopReason, Trajectory, Turn


def turn(role: str, earned: Mapping[str, float] | None, *, reward: float = 0.0, episode: int = 0) -> Turn:
    return Turn(start=0, stop=0, reward=reward, role=role, role_rewards=earned, episode=episode)


def rewards(*turns: Turn) -> list[float]:
    return [one.reward for one in attribute_rewards(turns)[0]]


def test_a_turn_bears_what_its_role_earns_up_to_its_next_turn() -> None:
    turns = [turn("X", {}), turn("O", {"X": 0.25}), turn("X", {"O": -1.0}), turn("O", {"X": 1.0, "O": 0.5})]
    settled, final_rewards = attribute_rewards(turns)
    assert [one.reward for one in settled] == [0.25, -1.0, 1.0, 0.5]
    assert final_rewards == {"X": 1.25, "O": -0.5}
    assert list(final_rewards) == ["X", "O"]


def test_what_a_role_earns_before_its_first_move_lies_on_that() -> None:
    assert rewards(turn("X", {"O": -2.0}), turn("O", {"O": 0.5})) == [0.0, -1.5]


def test_what_a_role_earns_that_never_moves_is_kept_and_lies_nowhere() -> None:
    settled, final_rewards = attribute_rewards([turn("X", {"X": 1.0, "O": -1.0})])
    assert [one.reward for one in settled] == [1.0]
    assert final_rewards == {"X": 1.0, "O": -1.0}


def test_each_episode_is_settled_by_itself() -> None:
    first = turn("X", {"X": 1.0, "O": -1.0})
    second = turn("O", {"X": 5.0, "O": 2.0}, episode=1)
    settled, final_rewards = attribute_rewards([first, second])
    assert [one.reward for one in settled] == [1.0, 2.0]
    assert final_rewards == {"X": 6.0, "O": 1.0}


def test_a_step_that_does_not_name_whom_it_rewards_gives_who_moved() -> None:
    assert rewards(turn("X", None, reward=-0.25), turn("O", {"X": 1.0, "O": -1.0})) == [0.75, -1.0]
    untold = [turn("X", None, reward=-0.25), turn("O", None, reward=1.0)]
    assert attribute_rewards(untold) == (untold, {})


by_role = st.none() | st.dictionaries(st.sampled_from("XOZ"), st.integers(-3, 3).map(float))
played = st.lists(st.builds(turn, st.sampled_from("XO"), by_role, reward=st.integers(-3, 3).map(float)), max_size=8)


@given(played)
def test_a_return_is_all_that_the_role_earns_from_then_on(turns: list[Turn]) -> None:
    settled, final_rewards = attribute_rewards(turns)
    if not final_rewards:
        assert settled == turns
        return
    earned = [{one.role: one.reward} if one.role_rewards is None else one.role_rewards for one in turns]
    for k, one in enumerate(turns):
        is_first = one.role not in [other.role for other in turns[:k]]
        own = math.fsum(other.reward for other in settled[k:] if other.role == one.role)
        assert own == math.fsum(step.get(one.role, 0.0) for step in earned[0 if is_first else k :])
    assert final_rewards == {role: math.fsum(step.get(role, 0.0) for step in earned) for role in final_rewards}
    assert attribute_rewards(settled)[0] == settled or any(one.role_rewards is None for one in turns)


def recorded() -> Trajectory:
    moves = [("X", {}), ("O", {}), ("X", {"X": 1.0, "O": -3.0})]
    turns = [
        Turn(start=2 * k, stop=2 * k + 2, reward=0.0, role=role, role_rewards=earned)
        for k, (role, earned) in enumerate(moves)
    ]
    settled, final_rewards = attribute_rewards(turns)
    return Trajectory(
        token_ids=range(6),
        turns=settled,
        messages=[],
        final_reward=1.0,
        final_rewards=final_rewards,
        stop_reason=StopReason.DONE,
    )


@pytest.mark.parametrize(
    ("turn_credit", "expected"),
    [
        ("step", [0.0, -3.0, 1.0]),
        ("final", [0.0, -3.0, 1.0]),
        ("repeat_final", [1.0, -3.0, 1.0]),
        ("spread_final", [0.5, -3.0, 0.5]),
    ],
)
def test_every_turn_credit_goes_by_role(turn_credit: str, expected: list[float]) -> None:
    assert credited_rewards(recorded(), turn_credit) == expected
    on_tokens = [reward / 2 for reward in expected for _ in range(2)]
    assert per_token_rewards(recorded(), turn_credit=turn_credit) == on_tokens


def test_totals_that_are_not_the_sums_are_found() -> None:
    right = recorded()
    assert reward_mismatch(right, is_sum=True) == ""
    assert reward_mismatch(replace(right, final_rewards={}), is_sum=False).startswith(
        "final_rewards must be the totals"
    )
    moved = [right.turns[0], replace(right.turns[1], reward=1.0), right.turns[2]]
    assert reward_mismatch(replace(right, turns=moved), is_sum=False).startswith("turn rewards must be the rewards of")
    message = reward_mismatch(replace(right, final_reward=-3.0), is_sum=False)
    assert message == "final_reward must be the total of the first turn's role, 1.0, got -3.0"
