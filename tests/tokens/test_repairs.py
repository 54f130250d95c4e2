"""A call that was meant is executed if there is one reading of it; a quotation never is."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from chat_families import family

from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, ToolCall


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
    }
    return {"type": "function", "function": {"name": name, "description": "Do.", "parameters": parameters}}


TOOLS = [tool("add", a="integer", b="integer"), tool("say", text="string")]
XML = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
NATIVE = {"qwen3": f"<tool_call>\n{JSON}\n</tool_call>", "qwen3_6": f"<tool_call>\n{XML}\n</tool_call>"}
ADD = {"a": 1, "b": 2}


def read(name: str, text: str, **options: Any) -> Action:
    """Read sampled ids under a template of TRL's whose generation prompt begins no reasoning."""
    tokenizer = family(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    action = Action(text=tokenizer.decode(ids, skip_special_tokens=True), token_ids=ids)
    return read_answer(action, ChatFormat.of(tokenizer, append=False), TOOLS, **options)


REPAIRS = {
    "opening_tag": f"{XML}\n</tool_call>",
    "opening_tag of two": f"{XML}\n{XML}\n</tool_call>",
    "opening_tag after text": f"I add them.\n\n{XML}",
    "opening_tag in a fence": f"```xml\n{XML}\n```",
    "bare with its arguments first": '{"arguments": {"a": 1, "b": 2}, "name": "add"}',
    "bare": JSON,
    "bare after text": f"I add them.\n{JSON}",
    "bare with parameters": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "bare as OpenAI writes it": '{"type": "function", "function": ' + JSON + "}",
    "bare list": f"[{JSON}, {JSON}]",
    "bare in a fence": f"So:\n```json\n{JSON}\n```",
    "bare Python": "[add(a=1, b=2)]",
    "bare Python in a fence": "```python\n[add(a=1, b=2)]\n```\n",
    "bare without its opening tag": f"{JSON}\n</tool_call>",
    "arguments_text": json.dumps({"name": "add", "arguments": json.dumps(ADD)}),
    "trailing_comma": '{"name": "add", "arguments": {"a": 1, "b": 2,},}',
    "trailing_comma between tags": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2,}}\n</tool_call>',
}


@pytest.mark.parametrize("kind", REPAIRS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "gptoss", "llama3", "gemma4_v5"])
def test_a_call_that_was_meant_is_read_and_names_its_repair(name: str, kind: str) -> None:
    text = REPAIRS[kind]
    if (name, kind) == ("qwen3_5_nothink", "trailing_comma between tags"):
        pytest.skip("the family writes no JSON between these tags")
    action = read(name, text)
    assert {(call.name, call.error) for call in action.tool_calls} == {("add", None)}
    assert all(call.arguments == ADD for call in action.tool_calls)
    assert len(action.tool_calls) == (2 if "two" in kind or "list" in kind else 1)
    assert {call.repair for call in action.tool_calls} == {kind.partition(" ")[0]}
    assert action.text == ("I add them." if "after text" in kind else "So:" if text.startswith("So") else "")
    strict = read(name, text, is_strict=True)
    assert [call for call in strict.tool_calls if call.error is None] == []


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_call_needs_no_repair(name: str) -> None:
    prefix = "" if name == "qwen3" else "</think>"
    action = read(name, f"{prefix}{NATIVE[name]}", is_strict=True)
    assert action.tool_calls == (ToolCall(name="add", arguments=ADD),)


@pytest.mark.parametrize("name", NATIVE)
def test_a_call_at_the_end_of_an_open_thought_is_made(name: str) -> None:
    begins = "<think>\n" if name == "qwen3" else ""
    action = read(name, f"{begins}I need the sum.\n{NATIVE[name]}")
    assert action.tool_calls == (ToolCall(name="add", arguments=ADD, repair="open_thought"),)
    assert (action.text, action.reasoning) == ("", "I need the sum.")
    for text in (f"{begins}I could call {NATIVE[name]}", f"{begins}Maybe\n{NATIVE[name]}\nbut no"):
        assert read(name, text).tool_calls == ()
    closed = read(name, f"{begins}Maybe\n{NATIVE[name]}\n</think>\n\n7")
    assert (closed.tool_calls, closed.text) == ((), "7")


UNREADABLE = {
    "a wrong argument": '{"name": "add", "arguments": {"a": "one", "b": 2}}',
    "a missing argument": '{"name": "add", "arguments": {"a": 1}}',
    "a fence": '```json\n{"name": "add", "arguments": {"a": 1}}\n```',
    "an open tag": "<function=add>\n<parameter=a>\n1",
    "an open tag in a line": "I add:\n<function=add>\n<parameter=a>\n1",
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "llama3"])
def test_what_can_only_be_a_call_is_no_answer(name: str, kind: str) -> None:
    (call,) = read(name, UNREADABLE[kind]).tool_calls
    assert call.error is not None
    assert "a call looks like this: " in call.error


ANSWERS = (
    '{"answer": 7}',
    '{"name": "Bob", "arguments": {"for": ["peace"]}}',
    '{"name": "add"}',
    "[1, 2, 3]",
    f"Write `{JSON}` to add.",
    f"Write\n{JSON}\nto add.",
    f"Like this:\n```json\n{JSON}\n```\nThat is all.",
    f"```json\n// the call\n{JSON}\n```",
    f"```\n{JSON}\nand\n{JSON}\n```",
    "The tool is called with <function=add>, then its parameters.",
    "[add(a=1, b=2)] is how a call looks in Python.",
    "def add(a, b):\n    return a + b",
    f"An example:\n```\nconfig: 1\n{JSON}",
    f"The format is <example>\n{JSON}\n</example>",
    f"<answer>{JSON}</answer>",
    f'{{"calls": [\n{JSON}',
    json.dumps({"answer": f"<tool_call>{JSON}</tool_call>"}),
)


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "gptoss", "llama3"])
def test_an_answer_stays_an_answer(name: str, text: str) -> None:
    action = read(name, text)
    assert (action.tool_calls, action.text.strip()) == ((), text)


WORDS = ("The sum is 3.", "I think so.", "Note:", "- first", "1. then", "Hm, é日本 😀", "{", "]", "```", "a = [1, 2]")
QUOTED = (JSON, XML, "[add(a=1, b=2)]", f"[{JSON}]", '{"name": "say", "arguments": {"text": "</think>"}}')


def quoting(rng: random.Random) -> tuple[str, bool]:
    """An answer that quotes a call; whether it is complete."""
    quoted = rng.choice(QUOTED)
    before, after = (rng.choice(WORDS[:6]) for _ in range(2))
    whole = [
        f"<think>\n{before}\n{quoted}\n</think>\n\n{after}",
        f"{before} {quoted} {after}",
        f"{before}\n{quoted}\n{after}",
        f"{before}\n```json\n{after}\n{quoted}\n```",
        json.dumps({"answer": quoted, "note": before}),
        f"{before}\n```\n{quoted}\n```\n{after}",
    ]
    way = rng.randrange(len(whole) + 1)
    return (whole[way], True) if way < len(whole) else (quoted[: rng.randrange(1, len(quoted) - 1)], False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink", "gptoss", "llama3"])
def test_a_quoted_call_is_never_made(name: str) -> None:
    rng = random.Random(f"quotes {name}")
    for _ in range(500):
        text, is_complete = quoting(rng)
        action = read(name, text)
        assert [call for call in action.tool_calls if call.error is None] == [], text
        assert not is_complete or action.tool_calls == (), text


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "gptoss", "llama3_1"])
def test_a_hostile_answer_is_read_in_linear_time(name: str) -> None:
    pieces = (
        "{",
        "[",
        '{"name"',
        "<function=add>",
        "```json\n",
        "<tool_call>",
        "</tool_call>",
        "\n",
        '"',
        "\\",
        ",]",
        "add(",
    )
    for piece in pieces:
        text = piece * (100_000 // len(piece))
        action = read_answer(Action(text=text), ChatFormat.of(family(name), append=False), TOOLS)
        assert [call for call in action.tool_calls if call.error is None] == []


def test_a_strict_reading_counts_what_it_does_not_repair() -> None:
    for name, text in (
        ("qwen3", f"I add them.\n{JSON}"),
        ("qwen3", f"I add:\n{XML}"),
        ("qwen3_6", f"Hm.\n<tool_call>\n{XML}\n</tool_call>"),
    ):
        [call] = read(name, text, is_strict=True).tool_calls
        assert "not written in the expected form" in (call.error or "")


def test_a_complete_call_that_lacks_an_argument_is_no_answer() -> None:
    [call] = read("qwen3", "I add:\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>").tool_calls
    assert "the argument 'b' of 'add' is missing" in (call.error or "")


def test_a_call_in_an_open_thought_is_found_by_its_control_tokens() -> None:
    action = read("gemma4_v5", "<|channel>thought\nhm\n<|tool_call>call:add{a:1,b:2}<tool_call|>")
    assert ([call.name for call in action.tool_calls], action.reasoning) == (["add"], "hm")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '{"name": "' + '\\"' * 50_000),
        ("qwen3", "[add(a=[" + '\\"' * 50_000 + ")]"),
        ("gemma4_v5", "<|tool_call>call:add{" + "a." * 40_000 + "}<tool_call|>"),
        ("qwen3_6", "</think><tool_call><function=add>" + "<parameter=a>" * 7_692 + "</function></tool_call>"),
        ("qwen3", "<think></think>" * 6_666),
        ("qwen3", "<function=add></function>\n" * 3_846 + "x"),
    ],
)
def test_hostile_strings_are_read_in_linear_time(name: str, text: str) -> None:
    chat_format, sizes = ChatFormat.of(family(name), append=False), list[float]()
    for size in (len(text) // 4, len(text)):
        start = time.process_time()
        for tools in (TOOLS, None):
            read_answer(Action(text=text[:size]), chat_format, tools)
        sizes.append(time.process_time() - start)
    assert sizes[1] < 10 * sizes[0] + 0.2  # sixteen times if it is quadratic


def test_a_bare_native_call_begins_a_line_or_follows_another() -> None:
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    numbers = [len(read("llama3_1", text).tool_calls) for text in (f"I reply {call} so.", f"So\n{call}; {call}", call)]
    assert numbers == [0, 2, 1]
