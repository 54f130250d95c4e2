"""Rollouts as transitions, and as entries of TRL's ``rollout_func``: nothing of a failed one is trained on."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, Message, StopReason, Trajectory, Turn
from agentsgym.batch.views import TRANSITION_KEYS, flatten, transitions


def drawn(picture: str, *, failed: bool = False) -> Trajectory:
    """A trajectory drawn with '.' for an environment token and one letter an action; turn k is rewarded k + 1."""
    letters = sorted({*picture} - {"."})
    messages: list[Message] = []
    turns: list[Turn] = []
    for k, letter in enumerate(letters):
        messages += [{"role": "user", "content": f"q{k}"}, {"role": "assistant", "content": letter}]
        start, stop = picture.index(letter), picture.rindex(letter) + 1
        turns.append(Turn(start=start, stop=stop, reward=k + 1.0, message_index=len(messages) - 1))
    return Trajectory(
        token_ids=[ord(token) for token in picture],
        turns=turns,
        messages=messages,
        final_reward=10.0,
        logprobs=[-0.5 * index for index in range(len(picture))] if picture.islower() else None,
        per_token_rewards=[0.0 if token == "." else index / 2 for index, token in enumerate(picture)],
        stop_reason=StopReason.FAILED if failed else StopReason.DONE,
        session_id=picture,
    )


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


PICTURES = ["", ".", "..A", "..AA.B", "AB", "..AAA..BB.C."]


@pytest.mark.parametrize("picture", PICTURES)
def test_each_turn_is_what_was_answered_and_all_that_stood_before_it(picture: str) -> None:
    [ids], [prompts], [masks] = (transitions([drawn(picture)])[key] for key in ("ids", "prompt_ids", "mask"))
    letters = sorted({*picture} - {"."})
    assert [text(output) for output in ids] == [letter * picture.count(letter) for letter in letters]
    assert [text(prompt) for prompt in prompts] == [picture[: picture.index(letter)] for letter in letters]
    assert masks == [[1] * len(output) for output in ids]


def test_messages_end_with_the_response() -> None:
    nested = transitions([drawn("..AA.B")])
    assert [[message["content"] for message in turn] for turn in nested["messages"][0]] == [
        ["q0", "A"],
        ["q0", "A", "q1", "B"],
    ]
    assert nested["session_ids"] == [["..AA.B"] * 2]


def test_each_turn_has_its_tokens_log_probabilities_and_rewards() -> None:
    nested = transitions([drawn("..aa.b"), drawn("A")])
    assert nested["logprobs"] == [[[-1.0, -1.5], [-2.5]], [None]]
    assert nested["per_token_rewards"] == [[[1.0, 1.5], [2.5]], [[0.0]]]
    assert transitions([drawn("..aa.b")], return_all_steps=False)["logprobs"] == [[[-2.5]]]


@pytest.mark.parametrize(
    ("turn_credit", "rewards"),
    [("step", [1.0, 2.0]), ("final", [0.0, 10.0]), ("repeat_final", [10.0, 10.0]), ("spread_final", [7.5, 2.5])],
)
def test_rewards_follow_the_turn_credit(turn_credit: str, rewards: list[float]) -> None:
    assert transitions([drawn(".AAA.B")], turn_credit=turn_credit)["rewards"] == [rewards]


def test_an_unknown_turn_credit_is_refused() -> None:
    with pytest.raises(ConfigError, match="turn_credit cannot be 'finall'; did you mean 'final'"):
        transitions([drawn("A")], turn_credit="finall")


def test_a_failed_rollout_keeps_its_turns_and_is_rewarded_and_trained_nothing() -> None:
    nested = transitions([drawn("..AA.B", failed=True)])
    assert [text(ids) for ids in nested["ids"][0]] == ["AA", "B"]
    assert nested["mask"] == [[[0, 0], [0]]]
    assert nested["rewards"] == [[0.0, 0.0]]


@given(st.lists(st.sampled_from(PICTURES), max_size=5))
def test_only_the_last_turn_is_kept_in_the_short_form(pictures: list[str]) -> None:
    rollouts = [drawn(picture) for picture in pictures]
    full, last = transitions(rollouts), transitions(rollouts, return_all_steps=False)
    assert last == {key: [rollout[-1:] for rollout in full[key]] for key in TRANSITION_KEYS}


@given(st.lists(st.sampled_from(PICTURES), max_size=5))
def test_the_flat_form_is_the_nested_one_and_a_map(pictures: list[str]) -> None:
    nested = transitions([drawn(picture) for picture in pictures])
    flat = flatten(nested)
    assert flat.keys() == {*TRANSITION_KEYS, "episode_idx_map"}
    assert {len(value) for value in flat.values()} == {len(flat["episode_idx_map"])}
    again: dict[str, list[list[Any]]] = {key: [[] for _ in pictures] for key in TRANSITION_KEYS}
    for key in TRANSITION_KEYS:
        for index, item in zip(flat["episode_idx_map"], flat[key], strict=True):
            again[key][index].append(item)
    assert again == nested


def test_nothing_is_flattened_to_nothing() -> None:
    assert flatten({}) == {"episode_idx_map": []}


def test_the_completion_begins_with_the_first_action_and_ends_with_the_last() -> None:
    rollout = drawn("..AA.B.")
    entry = rollout.to_rollout()
    assert entry["prompt_ids"] + entry["completion_ids"] == list(rollout.token_ids[:6])
    assert entry["env_mask"] == entry["action_mask"] == [1, 1, 0, 1]
    assert entry["stop_reason"] == "done"


def test_a_failed_rollout_has_no_action_and_its_stop_reason_reports_why() -> None:
    played, failed = drawn("..AA.B").to_rollout(), drawn("..AA.B", failed=True).to_rollout()
    assert failed["env_mask"] == failed["action_mask"] == [0, 0, 0, 0]
    assert failed["stop_reason"] == "failed"
    assert failed["completion_ids"] == played["completion_ids"]


def test_a_rollout_without_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be converted to one row: it has no turns"):
        dataclasses.replace(drawn(".."), stop_reason=StopReason.DONE).to_rollout()
