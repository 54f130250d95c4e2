"""Conversations of chat messages become the trajectories that an environment would have recorded."""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Any

import numpy as np
import pytest
from chat_families import NAMES, family
from guess_game import Chatty, GuessEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_episodes_exact import canonical

from agentsgym import ConfigError, StopReason, TemplateError, Trajectory, audit, tiny_policy
from agentsgym.testing import chat_tokenizer

CHAT = [
    {"role": "system", "content": "You play."},
    {"role": "user", "content": "Guess."},
    {"role": "assistant", "content": "Seven?"},
    {"role": "user", "content": "Higher."},
    {"role": "assistant", "content": "Eight."},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"where": "north"}'}}


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 10**6), history=st.sampled_from(["append", "rerender"]))
def test_the_messages_of_a_rollout_give_its_record(name: str, seed: int, history: Any) -> None:
    tokenizer = family(name)
    config = {"history": history, "max_steps_per_episode": 3, "error_allowance": 3}
    try:
        env = GuessEnv(tokenizer, config)
        (played,) = env.rollout([{"seed": seed}], Chatty())
    except TemplateError as refused:
        with pytest.raises(TemplateError, match=re.escape(str(refused))):
            Trajectory.from_messages(tokenizer, CHAT[1:], 1.0, history=history)
        return
    made = Trajectory.from_messages(tokenizer, played.messages, played.turn_rewards, history=history)
    assert made.token_ids == played.token_ids
    assert made.agent_token_mask == played.agent_token_mask
    assert made.per_token_rewards == played.per_token_rewards
    assert made.segments == played.segments
    assert made.turn_rewards == played.turn_rewards
    assert made.final_reward == pytest.approx(played.final_reward)
    assert made.messages == played.messages
    assert not made.exact
    assert made.logprobs is None
    assert audit([made], vocabulary_size=len(tokenizer)).ok


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gptoss", "gemma4", "glm4moe", "ids of nine letters"])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_and_results_are_recorded_as_the_template_prints_them(name: str, as_text: bool) -> None:
    env, _, trajectories = canonical("ToolEnv", name)
    for played in trajectories:
        messages: Any = played.messages
        if as_text:  # as OpenAI writes arguments, nulls included
            messages = [
                {**one, "content": one["content"] or None, "tool_calls": [openai_call(c) for c in one["tool_calls"]]}
                if one.get("tool_calls")
                else {**one, "tool_calls": None, "refusal": None}
                for one in messages
            ]
        made = Trajectory.from_messages(env.tokenizer, messages, played.turn_rewards, tools=env.tool_schemas)
        assert made.token_ids == played.token_ids
        assert made.agent_token_mask == played.agent_token_mask
        assert made.messages == played.messages


def openai_call(call: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}


def test_one_number_gives_the_last_turn_and_a_list_each() -> None:
    tokenizer = chat_tokenizer()
    whole, each = (Trajectory.from_messages(tokenizer, CHAT, rewards) for rewards in (2, np.array([0.5, 1.0])))
    assert (whole.turn_rewards, whole.final_reward) == ([0.0, 2.0], 2.0)
    assert (each.turn_rewards, each.final_reward) == ([0.5, 1.0], 1.5)
    first = each.turns[0]
    assert sum(each.per_token_rewards[first.start : first.stop]) == pytest.approx(0.5)
    assert tokenizer.decode(each.token_ids[first.start : first.stop]) == "Seven?<|im_end|>"


def test_it_is_the_rollout_that_it_claims_to_be() -> None:
    facts: dict[str, Any] = {
        "session_id": "s",
        "task_index": 3,
        "rollout_index": 1,
        "task_data": {"seed": 7},
        "info": {"success": True},
    }
    made = Trajectory.from_messages(chat_tokenizer(), CHAT, 1.0, stop_reason="max_turns", **facts)
    assert {name: getattr(made, name) for name in facts} == facts
    assert made.stop_reason is StopReason.MAX_TURNS
    assert made.success
    ended = Trajectory.from_messages(chat_tokenizer(), CHAT, 1.0, stop_reason=StopReason.INVALID)
    assert [turn.invalid for turn in ended.turns] == [False, True]
    assert audit([made, ended]).ok


def test_openais_shapes_are_read_and_what_follows_the_last_answer_has_no_tokens() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "You "}, {"type": "text", "text": "play."}]},
        *CHAT[1:],
    ]
    tokenizer = chat_tokenizer()
    plain = Trajectory.from_messages(tokenizer, CHAT, 1.0)
    assert Trajectory.from_messages(tokenizer, chat, 1.0) == plain
    longer = Trajectory.from_messages(tokenizer, [*CHAT, {"role": "user", "content": "Yes!"}], 1.0)
    assert longer.token_ids == plain.token_ids
    assert longer.messages[-1]["content"] == "Yes!"
    thought = [CHAT[1], {"role": "assistant", "content": "Seven?", "reasoning": "Hm."}]
    assert Trajectory.from_messages(family("qwen3"), thought, 1.0).messages[-1]["reasoning_content"] == "Hm."


def test_without_a_template_texts_are_put_together_and_a_warning_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = chat_tokenizer("none")
    with caplog.at_level(logging.WARNING):
        made = Trajectory.from_messages(tokenizer, CHAT, 1.0)
    assert tokenizer.decode(made.token_ids) == "".join(one["content"] for one in CHAT)
    assert "chat template" in caplog.text
    text_only = Trajectory.from_messages(None, CHAT, 1.0)
    assert text_only.token_ids == []
    assert text_only.turn_rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("messages", "rewards", "options", "sentence"),
    [
        ([], 1.0, {}, r"messages must be a list of at least one chat message, got \[\]"),
        ("hello", 1.0, {}, "messages must be a list of at least one chat message, got 'hello'"),
        (CHAT[:2], 1.0, {}, "messages must contain an assistant message"),
        ([*CHAT[:2], "x"], 1.0, {}, r"messages\[2\] must be a dict with 'role' and 'content', got 'x'"),
        (
            [{"role": "robot", "content": "x"}],
            1.0,
            {},
            r"messages\[0\] must have one of the roles system, .*got 'robot'",
        ),
        ([{"role": "user", "content": 3}], 1.0, {}, r"messages\[0\]\['content'\] must be a string, .*got 3"),
        ([{"role": "user", "content": "\ud800"}], 1.0, {}, r"messages\[0\]\['content'\] must be valid Unicode"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            1.0,
            {},
            r"messages\[0\]\['content'\]\[0\] must be a text part",
        ),
        (
            [*CHAT[:2], {"role": "assistant", "refusal": "No."}],
            1.0,
            {},
            r"messages\[2\] has the field 'refusal', which chat templates",
        ),
        (CHAT[2:], 1.0, {}, r"the assistant message messages\[0\] is the first message: add a message before it"),
        (
            [*CHAT[:3], CHAT[4]],
            1.0,
            {},
            r"the assistant message messages\[3\] directly follows another one, messages\[2\]: merge the two",
        ),
        (CHAT, [1.0], {}, r"rewards must be a single number or one number per assistant message \(2\), got 1: \[1.0\]"),
        (CHAT, 10**400, {}, "rewards must be finite numbers, got 10+… for assistant message 1"),
        (CHAT, math.nan, {}, "rewards must be finite numbers, got nan for assistant message 1"),
        (CHAT, [0.0, math.inf], {}, "rewards must be finite numbers, got inf for assistant message 1"),
        (CHAT, True, {}, "rewards must be finite numbers, got True for assistant message 1"),
        (CHAT, "1", {}, "rewards must be finite numbers, got '1' for assistant message 1"),
        (CHAT, 1.0, {"stop_reason": "failed"}, "stop_reason must be one of done, max_turns, max_tokens, invalid, got"),
        (CHAT, 1.0, {"task_index": -1}, "task_index must be an int of at least 0, got -1"),
        (
            CHAT,
            1.0,
            {"sesion_id": "a"},
            "'sesion_id' is not a metadata field of a recorded rollout; did you mean 'session_id'",
        ),
        (CHAT, 1.0, {"tools": {}}, "tools must be a list of JSON schemas, got {}"),
        (CHAT, 1.0, {"history": "last"}, "history must be 'append' or 'rerender', got 'last'"),
        (
            [CHAT[1], {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}],
            1.0,
            {},
            r"messages\[1\]\['tool_calls'\]\[0\] must have arguments that are valid JSON, got '{'",
        ),
        (
            [CHAT[1], {"role": "assistant", "tool_calls": [{"id": "c"}]}],
            1.0,
            {},
            r"messages\[1\]\['tool_calls'\]\[0\] has no name: it must name the tool, got {'id': 'c'}",
        ),
        (
            [{**CHAT[1], "tool_calls": [CALL]}, CHAT[2]],
            1.0,
            {},
            r"messages\[0\]\['tool_calls'\] must be a list, and only assistant messages may have it",
        ),
    ],
)
def test_what_cannot_be_read_is_named(messages: Any, rewards: Any, options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Trajectory.from_messages(chat_tokenizer(), messages, rewards, **options)


def test_a_name_is_no_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer must be a transformers tokenizer or None, got 'Qwen/Qwen3'"):
        Trajectory.from_messages("Qwen/Qwen3", CHAT, 1.0)


def test_a_template_that_cannot_names_what_would_do() -> None:
    with pytest.raises(TemplateError, match="system"):
        Trajectory.from_messages(family("Gemma"), CHAT, 1.0)
    assert Trajectory.from_messages(family("Gemma"), CHAT[1:], 1.0).num_turns == 2


def test_a_token_for_unknown_words_that_also_ends_turns_is_no_unknown_word() -> None:
    tokenizer = chat_tokenizer()
    expected = Trajectory.from_messages(tokenizer, CHAT, 1.0)
    tokenizer.unk_token = tokenizer.eos_token  # as in GPT-2, Pythia and others
    assert Trajectory.from_messages(tokenizer, CHAT, 1.0) == expected


def test_words_that_a_tokenizer_does_not_know_are_not_imitated() -> None:
    _, tokenizer = tiny_policy(["Guess.", "Higher.", "Seven?"])
    chat = [CHAT[1], {"role": "assistant", "content": "Zanzibar"}]
    with pytest.raises(ConfigError, match=r"cannot encode part of 'Zanzibar' \(turn 0\)"):
        Trajectory.from_messages(tokenizer, chat, 1.0)
