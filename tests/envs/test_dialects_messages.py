"""Anthropic's messages; the tests with its SDK are skipped if that is not installed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from dialect_clients import HELLO, LOOK, PARAMETERS, SCHEMA, Served, always, expected_messages, texts, turns
from hypothesis import given, settings

from agentsgym.envs.AgentProgram.calls import CallError
from agentsgym.envs.AgentProgram.dialects.messages import MESSAGES

PATH = MESSAGES.path
TOOL: dict[str, Any] = {"name": "look", "description": "Look.", "input_schema": PARAMETERS}
FULL = dataclasses.replace(HELLO, reasoning="Greet.", tool_calls=(LOOK,))
BODY: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def post(served: Served, **fields: Any) -> Any:
    """The body of a response, and its status if it is an error."""
    status, text, streams = served.body(PATH, {**BODY, **fields})
    if streams:
        pieces = [piece.split("\n") for piece in text.removesuffix("\n\n").split("\n\n")]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pieces]
    return json.loads(text) if status == 200 else (status, json.loads(text))


def sdk() -> Any:
    return pytest.importorskip("anthropic")


def create(served: Served, **fields: Any) -> Any:
    return served.client(sdk(), "Anthropic").messages.create(**{**BODY, **fields})


def test_a_response_has_the_documented_form() -> None:
    assert post(always(FULL)) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Greet.", "signature": ""},
            {"type": "text", "text": "Hello there"},
            {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "door", "times": 2}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 2},
        "agentsgym": {"calls": [{"id": "7"}]},
    }


def test_a_request_is_converted() -> None:
    served = always(HELLO)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "around."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Doors.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "door"}},
                {"type": "tool_use", "id": "b", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b"},
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "closed"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    post(
        served,
        messages=messages,
        system=system,
        tools=[TOOL],
        tool_choice={"type": "any"},
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"format": {"type": "json_schema", "schema": PARAMETERS}},
    )
    calls = [
        {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"at": "door"}}},
        {"type": "function", "id": "b", "function": {"name": "look", "arguments": {}}},
    ]
    (call,) = served.calls
    assert call.messages == (
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Look\naround."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Doors.", "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": "b", "name": "look"},
        {"role": "tool", "content": "closed", "tool_call_id": "a", "name": "look"},
        {"role": "user", "content": "Go on."},
    )
    assert (call.tools, call.stop, call.max_new_tokens) == ((SCHEMA,), ("END",), 9)


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (HELLO, "end_turn", None),
        (FULL, "tool_use", None),
        (dataclasses.replace(HELLO, stopped_by="END"), "stop_sequence", "END"),
        (dataclasses.replace(FULL, finish_reason="length"), "max_tokens", None),
    ],
    ids=["end", "call", "stop", "cut"],
)
def test_it_names_what_ended_the_answer(reply: Any, reason: str, sequence: str | None) -> None:
    response = post(always(reply))
    assert (response["stop_reason"], response["stop_sequence"]) == (reason, sequence)


def test_a_stream_gives_each_block_in_order() -> None:
    events = post(always(FULL), stream=True)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in events] == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    assert [data["index"] for _, data in events[1:-2]] == [0] * 3 + [1] * 3 + [2] * 3
    assert [data["delta"] for name, data in events if name == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "Greet."},
        {"type": "text_delta", "text": "Hello there"},
        {"type": "input_json_delta", "partial_json": '{"at": "door", "times": 2}'},
    ]
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"], start["usage"]) == (
        [],
        None,
        {"input_tokens": 3, "output_tokens": 0},
    )
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 2


REJECTED = [
    ({"max_tokens": None}, "max_tokens is missing: it must be a positive int"),
    ({"messages": []}, "messages must contain at least one message"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type is 'image', but the policy reads text only: leave the part out",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id is missing: it must be the id of a tool_use block",
    ),
    (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools[0].type must be 'custom', a tool that the program itself runs, got 'bash_20250124'",
    ),
]


def test_a_thread_is_rejected_as_the_sdk_expects_so_that_it_sends_the_whole_conversation() -> None:
    status, body = post(always(HELLO), thread={"type": "create"})
    assert (status, body["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


@pytest.mark.parametrize(("fields", "sentence"), REJECTED)
def test_a_request_that_cannot_be_served_is_rejected_with_a_sentence(fields: Any, sentence: str) -> None:
    error = {"type": "invalid_request_error", "message": sentence}
    assert post(always(HELLO), **fields) == (400, {"type": "error", "error": error})


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"), (503, "api_error")],
)
def test_an_error_has_the_kind_of_its_status(status: int, kind: str) -> None:
    assert MESSAGES.error(CallError("no", status=status))["error"] == {"type": kind, "message": "no"}


def test_the_sdk_reads_a_response() -> None:
    served = always(FULL)
    message = create(served, tools=[TOOL], system="Be brief.")
    thinking, text, call = message.content
    assert (thinking.thinking, text.text, call.input) == ("Greet.", "Hello there", {"at": "door", "times": 2})
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", 2)
    assert served.calls[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_the_sdk_accumulates_a_stream() -> None:
    with always(FULL).client(sdk(), "Anthropic").messages.stream(**BODY) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert texts == ["Hello there"]
    thinking, text, call = message.content
    assert (thinking.thinking, text.text, call.input) == ("Greet.", "Hello there", {"at": "door", "times": 2})
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 3, 2)


def test_the_sdk_raises_for_a_rejected_request() -> None:
    anthropic = sdk()
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be a positive int, got 0"):
        create(always(HELLO), max_tokens=0)


@settings(max_examples=40, deadline=None)
@given(texts, turns())
def test_what_the_sdk_sends_back_is_what_the_policy_answered(first: str, played: Any) -> None:
    replies = iter([*played, (HELLO, [])])
    served = Served(lambda call: [next(replies)[0]])
    messages: list[Any] = [{"role": "user", "content": first}]
    for reply, output in played:
        message = create(served, messages=messages)
        messages.append({"role": message.role, "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": text}
            for block, text in zip(
                message.content[-len(reply.tool_calls) :] if reply.tool_calls else (), output, strict=False
            )
        ]
        messages.append({"role": "user", "content": results or output[0]})
    create(served, messages=messages)
    assert list(served.calls[-1].messages) == expected_messages(first, played)
