import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.types import Action, StopReason, Trajectory, Turn, TurnRequest


def trajectory(picture: str, **fields: Any) -> Trajectory:
    """A trajectory drawn with '.' for an environment token and one letter an action."""
    turns = [
        Turn(start=picture.index(letter), stop=picture.rindex(letter) + 1, reward=float(k))
        for k, letter in enumerate(sorted({*picture} - {"."}))
    ]
    values: dict[str, Any] = {
        "messages": [],
        "final_reward": 0.0,
        "stop_reason": StopReason.DONE,
        "turns": turns,
    } | fields
    return Trajectory(token_ids=[*range(len(picture))], **values)


@pytest.mark.parametrize("picture", ["", ".", "A", "..AA", "..AA.B", "AB", "..AAA..BB.C."])
def test_the_mask_marks_exactly_the_agents_tokens(picture: str) -> None:
    assert trajectory(picture).agent_token_mask == [int(token != ".") for token in picture]


def test_the_derived_values_follow_the_turns() -> None:
    record = trajectory("..AA.B")
    assert record.turn_rewards == [0.0, 1.0]
    assert record.exact
    inexact = dataclasses.replace(record.turns[1], exact=False)
    assert not dataclasses.replace(record, turns=[record.turns[0], inexact]).exact
    assert trajectory("").exact


@pytest.mark.parametrize(("info", "success"), [({}, None), ({"success": True}, True), ({"success": 0}, False)])
def test_success_is_what_the_game_says(info: dict[str, Any], success: bool | None) -> None:
    assert trajectory("", info=info).success is success


@pytest.mark.parametrize("spans", [[(-1, 1)], [(1, 0)], [(0, 4)], [(0, 2), (1, 3)], [(2, 3), (0, 1)]])
def test_spans_that_overlap_or_leave_the_tokens_are_refused(spans: list[tuple[int, int]]) -> None:
    turns = [Turn(start=start, stop=stop, reward=0.0) for start, stop in spans]
    with pytest.raises(ValueError, match=r"turn \d: \[-?\d, \d\) overlaps or leaves \[0, 3\)"):
        trajectory("...", turns=turns)


@pytest.mark.parametrize("name", ["logprobs", "per_token_rewards"])
def test_a_value_a_token_or_none_is_wanted(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs one value a token, got 1 for 3"):
        trajectory("...", **{name: [0.0]})


@given(st.lists(st.integers(0, 9), max_size=4) | st.none(), st.lists(st.floats(-9, 0), max_size=4) | st.none())
def test_an_action_has_one_log_probability_an_id(ids: list[int] | None, logprobs: list[float] | None) -> None:
    if logprobs is None or (ids is not None and len(ids) == len(logprobs)):
        assert Action(text="", token_ids=ids, logprobs=logprobs).finish_reason == "stop"
    else:
        with pytest.raises(ValueError, match="an Action needs one log-probability an id"):
            Action(text="", token_ids=ids, logprobs=logprobs)


def test_stop_reasons_know_which_of_them_truncate() -> None:
    assert {reason for reason in StopReason if reason.truncated} == {"max_turns", "max_tokens"}
    assert [str(reason) for reason in StopReason] == ["done", "max_turns", "max_tokens", "invalid", "failed"]
    assert [trajectory("", stop_reason=reason).failed for reason in StopReason] == [False] * 4 + [True]


@pytest.mark.parametrize(
    "value",
    [
        Action(text="a"),
        Turn(start=0, stop=0, reward=0.0),
        TurnRequest(session_id="", messages=[], token_ids=[]),
        trajectory(""),
    ],
)
def test_values_are_frozen(value: Any) -> None:
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
