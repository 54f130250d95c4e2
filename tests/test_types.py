import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
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
def test_success_is_what_the_game_returns(info: dict[str, Any], success: bool | None) -> None:
    assert trajectory("", info=info).success is success


@pytest.mark.parametrize("spans", [[(-1, 1)], [(1, 0)], [(0, 4)], [(0, 2), (1, 3)], [(2, 3), (0, 1)]])
def test_spans_that_overlap_or_leave_the_tokens_are_refused(spans: list[tuple[int, int]]) -> None:
    turns = [Turn(start=start, stop=stop, reward=0.0) for start, stop in spans]
    with pytest.raises(
        ValueError,
        match=r"turn \d: its span \[-?\d, \d\) is not valid, overlaps the previous turn, or exceeds the 3 tokens",
    ):
        trajectory("...", turns=turns)


@pytest.mark.parametrize("parents", [[0], [None, 1], [None, 0, -1], [None, 2, 0]])
def test_a_parent_is_an_earlier_turn(parents: list[int | None]) -> None:
    turns = [Turn(start=0, stop=0, reward=0.0, parent=parent) for parent in parents]
    with pytest.raises(ValueError, match=r"turn \d: parent must be the index of an earlier turn or None, got -?\d"):
        trajectory("", turns=turns)


def test_parents_survive_pickling_and_json() -> None:
    turns = [Turn(start=0, stop=0, reward=0.0, parent=parent) for parent in (None, 0, 0, 2)]
    one = trajectory("", turns=turns)
    assert pickle.loads(pickle.dumps(one)).turns == turns
    assert [turn["parent"] for turn in json.loads(json.dumps(one.as_dict()))["turns"]] == [None, 0, 0, 2]
    assert repr(turns[3]) == "Turn(start=0, stop=0, reward=0.0, parent=2)"


@pytest.mark.parametrize("name", ["logprobs", "per_token_rewards"])
def test_a_value_a_token_or_none_is_wanted(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs one value per token, got 1 for 3"):
        trajectory("...", **{name: [0.0]})


@given(st.lists(st.integers(0, 9), max_size=4) | st.none(), st.lists(st.floats(-9, 0), max_size=4) | st.none())
def test_an_action_has_one_log_probability_an_id(ids: list[int] | None, logprobs: list[float] | None) -> None:
    if logprobs is None or (ids is not None and len(ids) == len(logprobs)):
        assert Action(text="", token_ids=ids, logprobs=logprobs).finish_reason == "stop"
    else:
        with pytest.raises(ValueError, match="an Action needs one log-probability per id"):
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


def test_a_turn_is_shown_by_what_is_not_at_its_default() -> None:
    assert repr(Turn(start=2, stop=5, reward=-0.5)) == "Turn(start=2, stop=5, reward=-0.5)"
    shown = repr(Turn(start=2, stop=5, reward=1.0, invalid=True, exact=False, role=("x", 1), prompt_messages=[]))
    assert shown == "Turn(start=2, stop=5, reward=1.0, invalid=True, exact=False, role=('x', 1), prompt_messages=<0>)"


def test_an_action_and_a_request_are_shown_in_a_line() -> None:
    action = Action(text="yes\x1b[2J" * 10_000, token_ids=[*range(5000)], logprobs=[0.0] * 5000, finish_reason="length")
    assert repr(action).endswith("…, token_ids=<5000>, logprobs=<5000>, finish_reason='length')")
    assert len(repr(action)) < 200
    assert "\x1b" not in repr(action)
    assert repr(Action(text="a")) == "Action(text='a')"
    request = TurnRequest(session_id="s", messages=[{"role": "user", "content": "x" * 9999}], token_ids=[1, 2])
    assert repr(request) == "TurnRequest(session_id='s', messages=<1>, token_ids=<2>)"
    assert repr(dataclasses.replace(request, agent_state=np.zeros(3))).endswith("agent_state=array([0., 0., 0.]))")


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"info": {"success": True}}, "won"),
        ({"info": {"success": 0}}, "lost"),
        ({}, "played"),
        ({"stop_reason": StopReason.FAILED, "info": {"success": True}}, "failed"),
    ],
)
def test_a_trajectory_is_shown_by_how_it_went(fields: dict[str, Any], outcome: str) -> None:
    record = trajectory("..AA.B", final_reward=-0.0, task_index=3, **fields)
    assert record.outcome == outcome
    output = f"task 3, rollout 0: {outcome} after 2 turns ({record.stop_reason}), reward 0"
    assert repr(record) == f"<Trajectory of {output}, 6 tokens, 3 of them the agent's>"
    assert repr(trajectory("", turns=[Turn(start=0, stop=0, reward=0.0)])).endswith("after 1 turn (done), reward 0>")


def test_a_trajectory_as_a_dict_is_plain_json_with_every_field() -> None:
    turn = Turn(start=0, stop=2, reward=1.0, role=("seat", 1), role_rewards={0: 1.0, "b": np.float32(0.5)})
    record = Trajectory(
        token_ids=np.arange(3),  # pyright: ignore[reportArgumentType]
        turns=[turn],
        messages=[{"role": "user", "content": "\ud800"}],
        final_reward=math.inf,
        stop_reason=StopReason.DONE,
        logprobs=[math.nan, -0.5, 0.0],
        info={"board": {1, 2}, "object": Action(text="a"), "success": True},
        final_rewards={0: 1.0},
    )
    plain = record.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain.keys() == {one.name for one in dataclasses.fields(Trajectory)} | {
        "success",
        "failed",
        "agent_token_mask",
    }
    assert plain["turns"][0].keys() == {one.name for one in dataclasses.fields(Turn)}
    assert plain["turns"][0]["role"] == ["seat", 1]
    assert plain["turns"][0]["role_rewards"] == {"0": 1.0, "b": 0.5}
    assert (plain["token_ids"], plain["logprobs"]) == ([0, 1, 2], [None, -0.5, 0.0])
    assert (plain["final_reward"], plain["stop_reason"], plain["agent_token_mask"]) == ("inf", "done", [1, 1, 0])
    assert plain["info"] == {"board": [1, 2], "object": "Action(text='a')", "success": True}


def test_a_constructor_that_was_removed_names_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"^reading OpenEnv's TrainingTrace was removed in 0\.3\.0: use"):
        Trajectory.from_training_trace({"turns": []}, 1.0)
