"""Where rewards lie, by token and by role. Drawn: '.' given, a letter one action's token, '_' an action without."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, StopReason, Trajectory, Turn
from agentsgym.credit.components import attribute_rewards, reward_mismatch
from agentsgym.credit.rewards import TOKEN_CREDITS, TURN_CREDITS, check_credit, credited_rewards, per_token_rewards

PAIRS = [
    (turn_credit, token_credit)
    for turn_credit, token_credit in itertools.product(TURN_CREDITS, TOKEN_CREDITS)
    if turn_credit != "spread_final" or token_credit == "spread"
]


def drawn(picture: str, rewards: list[float], final_reward: float) -> Trajectory:
    """A trajectory as the picture shows it."""
    turns: list[Turn] = []
    edge = 0
    for symbol, run in itertools.groupby(picture):
        length = 0 if symbol == "_" else len(list(run))
        if symbol != ".":
            turns.append(Turn(start=edge, stop=edge + length, reward=rewards[len(turns)]))
        edge += length
    return Trajectory(
        token_ids=range(edge), turns=turns, messages=[], final_reward=final_reward, stop_reason=StopReason.DONE
    )


trajectories = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.floats(-100, 100)), max_size=6
).flatmap(  # (given tokens, action tokens, reward) of each turn
    lambda turns: st.builds(
        drawn,
        st.just("".join("." * given_ + (chr(65 + k) * length or "_") for k, (given_, length, _) in enumerate(turns))),
        st.just([reward for _, _, reward in turns]),
        st.floats(-100, 100),
    )
)


@pytest.mark.parametrize(
    ("turn_credit", "token_credit", "expected"),
    [
        ("step", "spread", [0, 0, 1, 1, 0, 1, 1, 1, 0]),
        ("step", "last", [0, 0, 0, 2, 0, 0, 0, 3, 0]),
        ("step", "each", [0, 0, 2, 2, 0, 3, 3, 3, 0]),
        ("final", "spread", [0, 0, 0, 0, 0, 2, 2, 2, 0]),
        ("final", "last", [0, 0, 0, 0, 0, 0, 0, 6, 0]),
        ("final", "each", [0, 0, 0, 0, 0, 6, 6, 6, 0]),
        ("repeat_final", "spread", [0, 0, 3, 3, 0, 2, 2, 2, 0]),
        ("repeat_final", "last", [0, 0, 0, 6, 0, 0, 0, 6, 0]),
        ("repeat_final", "each", [0, 0, 6, 6, 0, 6, 6, 6, 0]),
        ("spread_final", "spread", [0, 0, 1.2, 1.2, 0, 1.2, 1.2, 1.2, 0]),
    ],
)
def test_each_form_lays_the_reward_where_the_picture_states(
    turn_credit: str, token_credit: str, expected: list[float]
) -> None:
    trajectory = drawn("..AA.BBB.", rewards=[2.0, 3.0], final_reward=6.0)
    placed = per_token_rewards(trajectory, turn_credit=turn_credit, token_credit=token_credit)
    assert placed == pytest.approx(expected, abs=1e-15)


def test_the_table_covers_every_form() -> None:
    assert len(PAIRS) == 10


def test_the_defaults_spread_what_each_turn_earned() -> None:
    trajectory = drawn("A..BB", rewards=[2.0, 3.0], final_reward=6.0)
    assert per_token_rewards(trajectory) == [2.0, 0.0, 0.0, 1.5, 1.5]


@given(trajectories, st.sampled_from(PAIRS))
def test_given_tokens_never_have_rewards(trajectory: Trajectory, pair: tuple[str, str]) -> None:
    placed = per_token_rewards(trajectory, turn_credit=pair[0], token_credit=pair[1])
    assert len(placed) == len(trajectory.token_ids)
    assert all(reward == 0.0 for reward, own in zip(placed, trajectory.agent_token_mask, strict=True) if not own)


@given(trajectories, st.sampled_from([pair for pair in PAIRS if pair[1] != "each"]))
def test_spread_and_last_give_out_what_the_turns_with_tokens_earned(
    trajectory: Trajectory, pair: tuple[str, str]
) -> None:
    counts = [turn.stop - turn.start for turn in trajectory.turns]
    amounts = credited_rewards(trajectory, pair[0])
    earned = math.fsum(amount for amount, count in zip(amounts, counts, strict=True) if count)
    placed = per_token_rewards(trajectory, turn_credit=pair[0], token_credit=pair[1])
    assert math.fsum(placed) == pytest.approx(earned, abs=1e-9)


@given(trajectories)
def test_spread_final_rewards_every_agent_token_alike(trajectory: Trajectory) -> None:
    placed = per_token_rewards(trajectory, turn_credit="spread_final")
    num_agent_tokens = sum(trajectory.agent_token_mask)
    expected = [trajectory.final_reward / num_agent_tokens if own else 0.0 for own in trajectory.agent_token_mask]
    assert placed == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("picture", "turn_credit", "expected"),
    [
        (".A_.", "step", [0, 2, 0]),  # what the empty answer was given lies nowhere
        (".A_.", "final", [0, 0, 0]),  # and so does the final reward on it
        (".A_.", "repeat_final", [0, 6, 0]),
        (".A_.", "spread_final", [0, 6, 0]),
        (".__", "spread_final", [0]),
        ("", "step", []),
    ],
)
def test_a_turn_without_tokens_rewards_no_token(picture: str, turn_credit: str, expected: list[float]) -> None:
    trajectory = drawn(picture, rewards=[2.0, 3.0], final_reward=6.0)
    assert per_token_rewards(trajectory, turn_credit=turn_credit) == expected


@pytest.mark.parametrize(
    ("turn_credit", "expected"),
    [
        ("step", [1.0, 2.0, 4.0]),
        ("final", [0.0, 0.0, 8.0]),
        ("repeat_final", [8.0, 8.0, 8.0]),
        ("spread_final", [2.0, 0.0, 6.0]),
    ],
)
def test_credited_rewards_by_hand(turn_credit: str, expected: list[float]) -> None:
    assert credited_rewards(drawn("A_CCC", [1.0, 2.0, 4.0], 8.0), turn_credit) == expected


@pytest.mark.parametrize("turn_credit", TURN_CREDITS)
def test_no_turns_and_no_tokens_are_no_error(turn_credit: str) -> None:
    assert credited_rewards(drawn("", [], 1.0), turn_credit) == []


def test_without_tokens_spread_final_rewards_nobody() -> None:
    assert credited_rewards(drawn("_._", [1.0, 2.0], 3.0), "spread_final") == [0.0, 0.0]


def test_each_role_is_rewarded_as_if_there_were_no_others() -> None:
    game = drawn("ABC", [0.0, -1.0, 1.0], 1.0)
    turns = [replace(turn, role=role) for turn, role in zip(game.turns, "XOX", strict=True)]
    won = replace(game, turns=turns, final_rewards={"X": 1.0, "O": -1.0})
    assert credited_rewards(won, "step") == [0.0, -1.0, 1.0]
    assert credited_rewards(won, "final") == [0.0, -1.0, 1.0]
    assert credited_rewards(won, "repeat_final") == [1.0, -1.0, 1.0]
    assert credited_rewards(won, "spread_final") == [0.5, -1.0, 0.5]


@pytest.mark.parametrize(("turn_credit", "token_credit"), PAIRS)
def test_every_form_passes_the_check(turn_credit: str, token_credit: str) -> None:
    check_credit(turn_credit, token_credit)


@pytest.mark.parametrize(
    ("turn_credit", "token_credit", "message"),
    [
        ("steps", "spread", r"turn_credit cannot be 'steps'; did you mean 'step'\?"),
        ("step", "lst", r"token_credit cannot be 'lst'; did you mean 'last'\?"),
        ("spread_final", "last", "'spread_final' requires token_credit 'spread', got 'last'"),
        ("spread_final", "each", "'spread_final' requires token_credit 'spread', got 'each'"),
    ],
)
def test_a_wrong_pair_is_refused(turn_credit: str, token_credit: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_credit(turn_credit, token_credit)
    with pytest.raises(ConfigError, match=message):
        per_token_rewards(drawn("A", [1.0], 1.0), turn_credit=turn_credit, token_credit=token_credit)


def test_unknown_names_are_refused_by_the_parts_too() -> None:
    with pytest.raises(ConfigError, match="turn_credit cannot be 'fnal'"):
        credited_rewards(drawn("A", [1.0], 1.0), "fnal")
    with pytest.raises(ConfigError, match="token_credit cannot be 'eech'"):
        per_token_rewards(drawn("A", [1.0], 1.0), token_credit="eech")


def test_a_role_with_turns_needs_a_final_reward() -> None:
    with pytest.raises(
        ValueError, match=r"final_rewards must have a reward for each role that has a turn, but has none for {None}"
    ):
        credited_rewards(replace(drawn("A", [1.0], 1.0), final_rewards={"X": 1.0}), "step")


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
