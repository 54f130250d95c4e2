"""What reading costs, and what it makes of input that is not well-formed."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import family, tokenizer_for
from test_round_trips import TOOLS, chat_format_of

from agentsgym import Action, ConfigError, DirectOutputAgent
from agentsgym.envs import ToolEnv, TwentyQuestionsEnv
from agentsgym.export import kto_examples
from agentsgym.store.records import StoredRollout
from agentsgym.tokens.calls.reader import AnswerReader, read_answer, reader_of
from agentsgym.tokens.transcript import ChatFormat, Transcript

CALL = '<tool_call>\n{"name": "look", "arguments": {"text": "x"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "tools", "most"),
    [
        ("So it is.", None, 0),  # as before there was one reading
        ("<think>\nI\n</think>\n\nSo.", None, 1),
        ("So it is.", TOOLS, 1),
        (CALL, TOOLS, 1),
        (f"<think>\nI\n</think>\n\n{CALL}", TOOLS, 1),
    ],
)
def test_an_answer_is_decoded_once_at_most(text: str, tools: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, chat_format, decoded = family("qwen3"), chat_format_of("qwen3"), list[Any]()
    reader, decode = reader_of(chat_format), AnswerReader._decoded
    monkeypatch.setattr(AnswerReader, "_decoded", lambda self, ids: decoded.append(ids) or decode(self, ids))
    _ = reader.calls
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    action = Action(text=tokenizer.decode(ids, skip_special_tokens=True), token_ids=ids, finish_reason="stop")
    assert read_answer(action, chat_format, tools).text == (
        "So it is." if text.startswith("So") else "So." * (tools is None)
    )
    assert len(decoded) <= most


def test_reasoning_of_the_server_comes_before_that_in_the_text() -> None:
    action = read_answer(Action(text="<think>then</think>So.", reasoning="first"), None)
    assert (action.reasoning, action.text, action.written) == ("first\nthen", "So.", "<think>then</think>So.")


def test_a_response_template_with_an_invalid_pattern_is_refused_in_a_sentence() -> None:
    tokenizer = tokenizer_for(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls }}<|end|>{% endfor %}"
    )
    tokenizer.response_template = {"fields": {"tool_calls": {"open_pattern": "(", "close": ")"}}}
    with pytest.raises(ConfigError, match=r"open_pattern .* must be a regular expression: missing"):
        _ = ToolEnv(tokenizer, tools=[look]).chat_format


def look(text: str) -> str:
    """Look.

    Args:
        text: Where.
    """
    return text


def test_a_template_that_marks_thoughts_and_calls_alike_is_refused() -> None:
    tokenizer = tokenizer_for(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content is defined %}<|box|>{{ m.reasoning_content }}"
        "<|/box|>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<|box|>"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}<|/box|>{% endfor %}<|end|>'
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(ConfigError, match="prints calls that cannot be read back"):
        _ = ToolEnv(tokenizer, tools=[look]).chat_format


def test_what_no_template_marks_as_a_thought_is_text() -> None:
    tokenizer = family("llama3")
    ids = tokenizer.encode("Use </think> to close a thought.", add_special_tokens=False)
    action = Action(text=tokenizer.decode(ids), token_ids=ids)
    assert read_answer(action, ChatFormat.of(tokenizer, append=False)) is action
    said: Any = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "7", "reasoning_content": None}]
    assert list(ChatFormat.of(tokenizer).for_template(said)) == said  # None is no thought


def test_an_answer_that_was_read_from_other_ids_is_not_read_again() -> None:
    action = Action(text="Write <tool_call> to add.", written="<|channel|>final<|message|>Write <tool_call> to add.")
    assert read_answer(action, None, TOOLS) is action


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ODDLY = "<think>so\n\n</think>\nIs it alive?"


def sampled(tokenizer: Any, text: str, **more: Any) -> Action:
    """Read an answer with tools, from ids."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    given = Action(text=tokenizer.decode(ids, skip_special_tokens=True), token_ids=ids, **more)
    return read_answer(given, ChatFormat.of(tokenizer, append=False, tools=TOOLS), TOOLS)


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("text", [ODDLY, "<think></think>7", "<think>\nso\n</think>\n\n7"])
def test_a_thought_without_a_form_is_rendered_again_as_it_was_written(text: str, is_sampled: bool) -> None:
    tokenizer = tokenizer_for(PLAIN)
    ids = tokenizer(f"{text}<|end|>", add_special_tokens=False)["input_ids"]
    transcript = Transcript(ChatFormat.of(tokenizer), "rerender")
    transcript.observe([{"role": "user", "content": "go"}])
    transcript.act(read_answer(Action(text=text, token_ids=ids if is_sampled else None), transcript.chat_format))
    assert transcript.messages[1]["content"] == text.rpartition(">")[2].strip()
    transcript.observe([{"role": "user", "content": "on"}])
    printed = f"<|user|>go<|end|><|assistant|>{text}<|end|><|user|>on<|end|><|assistant|>"
    assert (tokenizer.decode(transcript.record()), transcript.segment_start) == (printed, 0)


def test_a_rollout_with_such_a_thought_is_forked_and_exported_as_it_was_written() -> None:
    env = TwentyQuestionsEnv(tokenizer_for(PLAIN), {"objects": ["apple"]})
    [played] = env.rollout([{"solution": "apple", "seed": 3}], DirectOutputAgent(lambda _: ODDLY))
    [fork] = env.fork(played, 2, DirectOutputAgent(lambda _: ODDLY), num_forks=1)
    assert fork.token_ids == played.token_ids
    [first, *_] = kto_examples([StoredRollout(trajectory=played)], min_reward=2.0)
    assert first["completion"] == [{"role": "assistant", "content": ODDLY}]


def test_a_thought_that_only_a_response_template_describes_is_read_beside_a_call() -> None:
    written = (
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    )
    calls = f"{{% for c in m.tool_calls or [] %}}{written}{{% endfor %}}"
    tokenizer = tokenizer_for(PLAIN.replace("{{ m.content }}", "{{ m.content }}" + calls))
    thought = {"open": "[[", "close_pattern": r"\]\]\s*", "content": "text"}
    tokenizer.response_template = {"fields": {"thinking": thought}}
    for text, num_calls in (("[[I]]\nSo.", 0), (f"[[I]]\n{CALL}", 1)):
        action = sampled(tokenizer, text)
        assert (action.reasoning, action.text, len(action.tool_calls)) == ("I", "So." * (not num_calls), num_calls)


XML = "<tool_call>\n<function=look>\n<parameter=text>\nwrite {} first\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("quoted", ["<tool_call>", "<tool_call> and </tool_call>", "<think>", "</think>"])
def test_an_argument_may_hold_a_marker(quoted: str) -> None:
    [call] = sampled(family("qwen3_5_nothink"), XML.format(quoted)).tool_calls
    assert (call.arguments, call.repair, call.error) == ({"text": f"write {quoted} first"}, None, None)


def test_a_call_behind_one_that_was_not_closed_is_read() -> None:
    whole = XML.format("x")
    first, second = sampled(family("qwen3_5_nothink"), f"{whole.removesuffix('</tool_call>')}{whole}").tool_calls
    assert (first.error is None, second.arguments) == (False, {"text": "write x first"})


@pytest.mark.parametrize("thought", [None, "I"])
def test_a_marker_in_the_call_of_a_truncated_answer_begins_no_thought(thought: str | None) -> None:
    cut = XML.format("<think>")[:-12]
    written = cut if thought is None else f"<think>\n{thought}\n</think>\n\n{cut}"
    tokenizer = family("qwen3_5_nothink")
    action = sampled(tokenizer, written, finish_reason="length")
    assert (action.reasoning, action.text, action.tool_calls) == (thought, action.text, ())
    assert "<function=look>" in action.text
    chat_format = ChatFormat.of(tokenizer, append=False, tools=TOOLS)
    assert chat_format.end_of_thought(action.token_ids or ()) == []


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("Use <tool_call> to look.", 0),
        ("A call looks like `<tool_call>{json}</tool_call>`.", 0),
        ("I look: <tool_call>{'name': 'look'}</tool_call>", 1),
        ("I look.\n<tool_call>\nlook it up\n</tool_call>", 1),
    ],
)
def test_a_marker_inside_a_sentence_of_text_is_no_call(text: str, errors: int) -> None:
    for chat_format in (None, chat_format_of("qwen3")):
        action = read_answer(Action(text=text), chat_format, TOOLS)
        assert (action.text, len(action.tool_calls)) == (text, errors)


def test_the_tags_around_a_reply_of_granite_are_no_text() -> None:
    tokenizer = tokenizer_for("{# <think></think><response></response> #}" + PLAIN)
    action = sampled(tokenizer, "<think>I</think><response>So.</response>")
    assert (action.reasoning, action.text) == ("I", "So.")


def test_calls_as_json_on_lines_of_their_own_are_repaired() -> None:
    one = '{"name": "look", "arguments": {"text": "x"}}'
    calls = sampled(family("qwen3"), f"I look.\n{one}\n{one}").tool_calls
    assert [(call.arguments, call.repair) for call in calls] == [({"text": "x"}, "bare")] * 2
    assert not sampled(family("qwen3"), f"{one}\nand\n{one}").tool_calls
