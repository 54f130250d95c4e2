"""Bodies of every kind: each is converted to a request of plain text, or rejected with a sentence."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from dialect_clients import BY_PATH, CREATED, HELLO, PARAMETERS, SCHEMA
from hypothesis import example, given, settings
from hypothesis import strategies as st
from values import plain

from agentsgym.envs.AgentProgram.calls import CallError
from agentsgym.envs.AgentProgram.dialects.completions import CHAT

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SAMPLING = {"temperature": 1, "seed": 3, "logit_bias": {}, "stream": True, "tool_choice": "auto"}
#: A valid body of each API with a value for each field that is read.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "model": "policy",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [CALL]},
            {"role": "tool", "content": "closed", "tool_call_id": "a"},
        ],
        "tools": [SCHEMA],
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}},
        "stop": ["END"],
        "max_tokens": 5,
        "n": 1,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {**SAMPLING, "model": "policy", "prompt": [[1, 2]], "echo": False, "best_of": 1, "logprobs": 1},
    "/v1/responses": {
        **SAMPLING,
        "model": "policy",
        "instructions": "Be brief.",
        "previous_response_id": "resp_1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "closed"},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
        "text": {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS}},
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
    },
    "/v1/messages": {
        **SAMPLING,
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look.", "signature": ""},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "door"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "closed"}]},
        ],
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
        "stop_sequences": ["END"],
        "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
    },
}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value inside a body."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if len(path) > 10:
        return [path]
    return [path, *(place for key, inner in pairs for place in places(inner, (*path, key)))]


def with_junk(body: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    changed = copy.copy(body)
    changed[path[0]] = with_junk(body[path[0]], path[1:], junk)
    return changed


def outcome(path: str, body: Any) -> None:
    """Parse a body, and write what it leads to: a response, or the body of an error."""
    dialect = BY_PATH[path]
    try:
        call = dialect.parse(body, lambda _: ({"role": "system", "content": "Earlier."},))
    except CallError as error:
        rejected: Any = dialect.error(error)
        json.dumps(rejected, ensure_ascii=False, allow_nan=False).encode()
        assert len(rejected["error"]["message"]) in range(10, 2000)
        return
    json.dumps([call.messages, call.tools, call.stop, call.prompt], ensure_ascii=False, allow_nan=False).encode()
    assert all(isinstance(message["content"], str) for message in call.messages)
    json.dumps(dialect.respond(call, [HELLO], CREATED), ensure_ascii=False, allow_nan=False).encode()
    "".join(dialect.stream(call, [HELLO], CREATED)).encode()


@pytest.mark.parametrize("path", VALID)
def test_the_body_to_be_spoiled_is_valid(path: str) -> None:
    earlier = ({"role": "user", "content": "Earlier."},)
    assert BY_PATH[path].parse(VALID[path], lambda _: earlier).streams  # type: ignore[arg-type]


junk = plain | st.sampled_from([nested(100), nested(10_000), {"type": "text"}, {"type": nested(3)}, [[]], [{}], [None]])


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(VALID)), st.data())
def test_a_value_of_any_kind_is_accepted_or_rejected_with_a_sentence(path: str, data: st.DataObject) -> None:
    body = VALID[path]
    for _ in range(data.draw(st.integers(1, 3))):
        body = with_junk(body, data.draw(st.sampled_from(places(body))), data.draw(junk))
    outcome(path, body)


@pytest.mark.parametrize("path", VALID)
def test_every_value_may_be_of_every_wrong_kind(path: str) -> None:
    wrong = (
        None,
        True,
        -1,
        10**400,
        math.nan,
        0.5,
        "",
        "\ud800",
        [],
        [[]],
        [{}],
        [None],
        {},
        {"type": "x"},
        nested(10_000),
    )
    for place in places(VALID[path]):
        for value in wrong:
            outcome(path, with_junk(VALID[path], place, value))
            if place:
                outcome(path, with_junk(VALID[path], place[:-1], {"type": "text", "text": "a", "extra": value}))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(VALID)), junk)
@example("/v1/responses", None)
def test_a_body_of_any_kind_is_rejected_with_a_sentence(path: str, body: Any) -> None:
    with pytest.raises(CallError):
        BY_PATH[path].parse(body, lambda _: None)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("a\ud800", "messages[0].content contains half of a surrogate pair, which is not valid Unicode"),
        (nested(10_000), "messages[0].content[0][0][0][0][0] is nested more than 64 deep"),
        ({"\udfff": 1}, "messages[0].content.\\udfff contains half of a surrogate pair, which is not valid Unicode"),
        ([math.inf], "messages[0].content[0] contains a number that is not finite or has too many digits"),
        (10**400, "messages[0].content contains a number that is not finite or has too many digits"),
    ],
    ids=["surrogate", "depth", "key", "infinity", "int"],
)
def test_a_value_that_no_tokenizer_accepts_is_named(value: Any, sentence: str) -> None:
    with pytest.raises(CallError) as caught:
        CHAT.parse({"model": "policy", "messages": [{"role": "user", "content": value}]}, lambda _: None)
    assert caught.value.message == sentence
