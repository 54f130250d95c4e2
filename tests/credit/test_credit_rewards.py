"""Where rewards lie, drawn: '.' a given token, a letter one action's token, '_' an action without tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.credit.rewards import TOKEN_CREDITS, TURN_CREDITS, check_credit, credited_rewards, per_token_rewards
from agentsgym.errors import ConfigError
from agentsgym.types import StopReason, Trajectory, Turn

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
