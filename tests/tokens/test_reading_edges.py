"""What reading costs, and what it makes of input that is not well-formed."""

from __future__ import annotations

from typing import Any

import pytest
from chat_families import family, tokenizer_for
from test_round_trips import TOOLS, chat_format_of

from agentsgym import Action, ConfigError
from agentsgym.envs import ToolEnv
from agentsgym.tokens.calls.reader import AnswerReader, read_answer, reader_of
from agentsgym.tokens.transcript import ChatFormat

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
