"""Calls of models whose template shows tools but renders no calls are read and shown in the model's own form."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from chat_families import TRL_TEMPLATES, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_chat import GO, TOOLS

from agentsgym import Action, ToolCall
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat, History, Transcript

GRANITE = (
    "{% if tools %}<|sys|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PYTHON = ("<|tool_call_start|>", "<|tool_call_end|>")
MARKERS = {"lfm2": PYTHON, "granite": ("<|tool_call|>", ""), "phi": ("<|tool_call|>", "<|/tool_call|>")}

values = (
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["<|tool_call|>[", "<|tool_call_end|>", "]", "a='b', c=\"d\"", "it's\n\\fine", "None"])
    | st.integers(-5, 5)
    | st.booleans()
    | st.none()
)
values |= st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=3), values, max_size=2)
calls = st.lists(values.map(lambda value: ToolCall(name="look", arguments={"where": value})), min_size=1, max_size=3)


@cache
def tokenizer_of(name: str) -> Any:
    template = TRL_TEMPLATES.get(name, GRANITE)
    tokenizer = tokenizer_for(template + "".join(MARKERS[name]) + "<|assistant|>")
    tokenizer.chat_template = template
    return tokenizer


def round_of(name: str, answer: Action, result: str, history: History) -> Transcript:
    """A question, an answer and the result of its call."""
    transcript = Transcript(ChatFormat.of(tokenizer_of(name), append=history == "append", tools=TOOLS), history)
    transcript.observe([GO])
    transcript.act(answer)
    transcript.observe([{"role": "tool", "content": result} for _ in answer.tool_calls])
    return transcript


@pytest.mark.parametrize("name", MARKERS)
@settings(max_examples=40, deadline=None)
@given(made=calls, text=st.sampled_from(["", "Let me see."]))
def test_what_is_written_is_read_and_shown_again(name: str, made: list[ToolCall], text: str) -> None:
    tokenizer, (opens, closes) = tokenizer_of(name), MARKERS[name]
    record = round_of(name, Action(text=text, tool_calls=made), "gone", "append")
    ids = record.token_ids
    [start] = [place for place, one in enumerate(ids) if one == tokenizer.convert_tokens_to_ids(opens)]
    assert not closes or ids.count(tokenizer.convert_tokens_to_ids(closes)) == 1  # those in arguments are letters
    chat_format = ChatFormat.of(tokenizer, tools=TOOLS)
    stop = next(place for place, one in enumerate(ids) if place > start and one in chat_format.end_of_turn_ids)
    sampled = Action(text="?", token_ids=ids[start : stop + 1], finish_reason="stop")
    read = read_answer(sampled, chat_format, TOOLS)
    assert [(one.name, one.arguments, one.error, one.repair) for one in read.tool_calls] == [
        ("look", one.arguments, None, None) for one in made
    ]
    again = round_of(name, Action(text=text, tool_calls=made), "gone", "rerender")
    assert again.token_ids == ids
    assert again.messages[1].get("tool_calls", [{}])[0]["function"]["arguments"] == made[0].arguments
    shown = chat_format.for_template(again.messages)
    assert tokenizer.apply_chat_template(
        shown, tools=TOOLS, tokenize=False, add_generation_prompt=True
    ) == chat_format.printed(again.messages)


@pytest.mark.parametrize("name", MARKERS)
def test_a_call_that_cannot_be_parsed_is_answered_with_the_form(name: str) -> None:
    tokenizer, (opens, closes) = tokenizer_of(name), MARKERS[name]
    chat_format = ChatFormat.of(tokenizer, tools=TOOLS)
    ids = tokenizer.encode(f"{opens}look here{closes}<|im_end|>", add_special_tokens=False)
    [call] = read_answer(Action(text="look here", token_ids=ids), chat_format, TOOLS).tool_calls
    assert call.error is not None
    written = f"{opens}[" + ("look_up(" if name == "lfm2" else json.dumps({"name": "look_up"})[:-1])
    assert written in call.error
