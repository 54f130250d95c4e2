"""The API of responses, called with OpenAI's SDK."""

from __future__ import annotations

import dataclasses
from typing import Any

import openai
import pytest
from dialect_clients import HELLO, LOOK, PARAMETERS, SCHEMA, Served, always, expected_messages, texts, turns
from hypothesis import given, settings
from pydantic import BaseModel

from agentsgym.envs.AgentProgram.calls import Reply
from agentsgym.envs.AgentProgram.dialects.shared import answer_message

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": PARAMETERS,
    "strict": None,
}
CHOICE: Any = {"type": "function", "name": "look"}
FULL = dataclasses.replace(HELLO, reasoning="Greet.", tool_calls=(LOOK,))


def create(served: Served, **fields: Any) -> Any:
    return served.client(openai).responses.create(**{"model": "policy", "input": "hi", **fields})


def test_an_answer_is_read_by_the_sdk() -> None:
    served = always(FULL)
    options = {"max_output_tokens": 9, "tool_choice": CHOICE, "extra_body": {"return_token_ids": True}}
    response = create(served, instructions="Be brief.", tools=[TOOL], **options)
    reasoning, message, call = response.output
    assert (response.id, response.status, response.output_text) == ("resp_7", "completed", "Hello there")
    assert (reasoning.type, reasoning.content[0].text, message.type) == ("reasoning", "Greet.", "message")
    assert (call.call_id, call.name, call.arguments) == ("call_1", "look", '{"at": "door", "times": 2}')
    assert len({item.id for item in response.output}) == 3
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
    assert (response.instructions, response.tools[0].name, response.max_output_tokens) == ("Be brief.", "look", 9)
    assert response.agentsgym["calls"][0]["prompt_token_ids"] == [1, 2, 3]
    (request,) = served.calls
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    assert (request.tools, request.max_new_tokens, request.n) == ((SCHEMA,), 9, 1)


def test_log_probabilities_are_included_if_they_are_requested() -> None:
    served, include = always(HELLO), ["message.output_text.logprobs"]
    [message] = create(served, include=include).output
    assert [(one.token, one.logprob) for one in message.content[0].logprobs] == [("Hello", -0.5), (" there", -0.25)]
    events = [one for one in create(served, include=include, stream=True) if one.type == "response.output_text.done"]
    assert [one.logprob for one in events[0].logprobs] == [-0.5, -0.25]
    [message] = create(served, include=["reasoning.encrypted_content"]).output
    assert message.content[0].logprobs == []


def test_an_answer_that_is_cut_is_incomplete() -> None:
    served = always(dataclasses.replace(FULL, finish_reason="length"))
    response = create(served)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["completed", "completed", "incomplete"]
    assert [event.type for event in create(served, stream=True)][-1] == "response.incomplete"


def test_items_become_messages() -> None:
    served = always(HELLO)
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Doors."}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at": "door"}'},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{"},
        {"type": "function_call_output", "call_id": "b", "output": "cannot parse"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "closed"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "It is closed."},
        {"role": "user", "content": "Thanks."},
    ]
    create(served, input=items)
    calls = [
        {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"at": "door"}}},
        {"type": "function", "id": "b", "function": {"name": "look", "arguments": "{"}},
    ]
    assert served.calls[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "reasoning_content": "Doors.", "tool_calls": calls},
        {"role": "tool", "content": "cannot parse", "tool_call_id": "b", "name": "look"},
        {"role": "tool", "content": "closed", "tool_call_id": "a", "name": "look"},
        {"role": "assistant", "content": "It is closed."},
        {"role": "user", "content": "Thanks."},
    )


def test_a_conversation_goes_on_from_an_earlier_response() -> None:
    served = always(FULL)
    first = create(served, instructions="Be brief.")
    result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "closed"}
    create(served, input=[result], previous_response_id=first.id, instructions="Be kind.")
    begun = [{"role": "user", "content": "hi"}, answer_message(FULL)]
    result = {"role": "tool", "content": "closed", "tool_call_id": "call_1", "name": "look"}
    assert list(served.calls[1].messages) == [{"role": "system", "content": "Be kind."}, *begun, result]
    own: Any = [{"role": "system", "content": "My own."}, {"role": "user", "content": "hi"}]
    second = create(served, input=own, instructions="Be brief.")
    create(served, input="on", previous_response_id=second.id, instructions="Be kind.")
    assert [one["content"] for one in served.calls[-1].messages if one["role"] == "system"] == ["Be kind.", "My own."]
    create(served, input="on", previous_response_id=second.id)
    assert [one["content"] for one in served.calls[-1].messages if one["role"] == "system"] == ["My own."]
    with pytest.raises(openai.BadRequestError, match="must be the id of an earlier response") as caught:
        create(served, previous_response_id="resp_unknown")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


TEXT_EVENTS = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]


def test_a_stream_gives_each_item_in_order() -> None:
    events = list(create(always(FULL), stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        *["output_item.added", *[kind.format("reasoning_text") for kind in TEXT_EVENTS], "output_item.done"],
        *["output_item.added", *[kind.format("output_text") for kind in TEXT_EVENTS], "output_item.done"],
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.output_index for event in events[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4
    assert events[0].response.output == []
    assert events[-1].response.output == [event.item for event in events if event.type == "response.output_item.done"]


def test_the_sdk_accumulates_a_stream() -> None:
    arguments: Any = {"model": "policy", "input": "hi", "tools": [{**TOOL, "strict": True}]}
    with always(FULL).client(openai).responses.stream(**arguments) as stream:
        deltas = {event.type: event.snapshot for event in stream if hasattr(event, "snapshot")}
        response = stream.get_final_response()
    assert deltas["response.output_text.delta"] == response.output_text == "Hello there"
    assert deltas["response.function_call_arguments.delta"] == '{"at": "door", "times": 2}'
    assert response.output[2].parsed_arguments == {"at": "door", "times": 2}


class Place(BaseModel):
    at: str


def test_an_answer_in_json_is_parsed_by_the_sdk() -> None:
    served = always(dataclasses.replace(HELLO, text='{"at": "door"}'))
    response = served.client(openai).responses.parse(model="policy", input="hi", text_format=Place)
    assert response.output_parsed == Place(at="door")


REJECTED = [
    ({"input": []}, "input", "input must contain at least one message"),
    ({"input": 5}, "input", "input must be a string or a list of items, got 5"),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input[0].type",
        "input[0].type must be one of 'message', 'reasoning', 'function_call', 'function_call_output', "
        "got 'item_reference'",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].type",
        "input[0].content[0].type is 'input_file', but the policy reads text only: leave the part out",
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
        "tools[0].type must be 'function', a tool that the program itself runs, got 'web_search'",
    ),
    (
        {"conversation": "conv_1"},
        "conversation",
        "conversation is not supported: give previous_response_id or the whole input",
    ),
]


@pytest.mark.parametrize(("fields", "param", "sentence"), REJECTED)
def test_a_request_that_cannot_be_served_is_rejected_with_a_sentence(fields: Any, param: str, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(always(HELLO), **fields)
    assert caught.value.body == {"message": sentence, "type": "invalid_request_error", "param": param, "code": None}


def play(first: str, played: Any, chained: bool) -> Served:
    """Play a conversation, sending back all items, or only the new ones with the id of the response before."""
    replies = iter([*played, (Reply(call_id="last", text=""), [])])
    served = Served(lambda call: [next(replies)[0]])
    items: Any = [{"role": "user", "content": first}]
    before = None
    for reply, output in played:
        response = create(served, input=items, previous_response_id=before if chained else openai.omit)
        before = response.id
        results: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": text}
            for item, text in zip(
                response.output[-len(reply.tool_calls) :] if reply.tool_calls else (), output, strict=False
            )
        ]
        new = results or [{"role": "user", "content": output[0]}]
        items = new if chained else [*items, *response.output, *new]
    create(served, input=items, previous_response_id=before if chained else openai.omit)
    return served


@settings(max_examples=40, deadline=None)
@given(texts, turns())
def test_what_the_sdk_sends_back_is_what_the_policy_answered(first: str, played: Any) -> None:
    for chained in (False, True):
        served = play(first, played, chained)
        assert list(served.calls[-1].messages) == expected_messages(first, played)
