"""Chat completions, called with OpenAI's SDK."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import openai
import pytest
from dialect_clients import HELLO, LOOK, SCHEMA, Served, always, expected_messages, texts, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from agentsgym.envs.AgentProgram.calls import CallError, Reply
from agentsgym.envs.AgentProgram.dialects.completions import CHAT

HI: Any = [{"role": "user", "content": "hi"}]


def create(served: Served, **fields: Any) -> Any:
    return served.client(openai).chat.completions.create(**{"model": "policy", "messages": HI, **fields})


def test_an_answer_is_read_by_the_sdk() -> None:
    served = always(HELLO)
    assert create(served).agentsgym == {"calls": [{"id": "7"}]}
    completion = create(served, extra_body={"return_token_ids": True})
    (choice,) = completion.choices
    assert (completion.id, completion.model, completion.created) == ("chatcmpl-7", "policy", 1_700_000_000)
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == ("Hello there", "stop", None)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        3,
        2,
        5,
    )
    call = {"id": "7", "prompt_token_ids": [1, 2, 3], "token_ids": [4, 5], "logprobs": [-0.5, -0.25]}
    assert completion.agentsgym == {"calls": [call]}


def test_a_request_is_converted() -> None:
    served = always(HELLO)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "around."}],
            "name": "Ann",
        },
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": ["door"]}'}},
                {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "cannot parse"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "closed"}]},
    ]
    create(
        served,
        messages=messages,
        tools=[SCHEMA],
        stop=["\n", "END"],
        max_tokens=9,
        max_completion_tokens=5,
        temperature=0.3,
        seed=1,
        logit_bias={"5": 3},
        parallel_tool_calls=True,
        user="me",
        extra_body={"top_k": 4, "chat_template_kwargs": {"any": "thing"}},
    )
    (call,) = served.calls
    assert call.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look\naround."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "a", "function": {"name": "look", "arguments": {"at": ["door"]}}},
                {"type": "function", "id": "b", "function": {"name": "look", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "name": "look", "content": "cannot parse"},
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": "closed"},
    )
    assert (call.model, call.stop, call.max_new_tokens, call.n, call.streams) == ("policy", ("\n", "END"), 5, 1, False)
    assert (call.tools, call.logprobs, call.prompt) == ((SCHEMA,), False, None)


def test_only_results_have_the_name_of_a_tool() -> None:
    served = always(HELLO)
    call = {"id": "", "type": "function", "function": {"name": "look", "arguments": ""}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x", "tool_call_id": ""}, *HI]
    create(served, messages=messages)
    assert [message.get("name") for message in served.calls[0].messages] == [None, "look", None]
    assert served.calls[0].messages[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_tool_calls_and_reasoning_are_read_by_the_sdk() -> None:
    reply = Reply(call_id="8", text="", reasoning="The door first.", tool_calls=(LOOK,))
    (choice,) = create(always(reply), tools=[SCHEMA]).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == "The door first."
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "look", '{"at": "door", "times": 2}')


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}, "none"])
def test_no_tools_are_offered_only_if_the_program_wants_no_call(choice: Any) -> None:
    served = always(HELLO)
    create(served, tools=[SCHEMA], tool_choice=choice)
    assert served.calls[0].tools == (() if choice == "none" else (SCHEMA,))


def test_several_answers_share_a_response() -> None:
    served = always(HELLO, dataclasses.replace(HELLO, call_id="9", text="Good", finish_reason="length"))
    completion = create(served, n=2)
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in completion.choices] == [
        (0, "Hello there", "stop"),
        (1, "Good", "length"),
    ]
    assert [call["id"] for call in completion.agentsgym["calls"]] == ["7", "9"]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 4)
    assert served.calls[0].n == 2


def test_log_probabilities_are_those_of_the_sampled_tokens() -> None:
    reply = dataclasses.replace(HELLO, token_texts=("Hé", "."), logprobs=(-0.5, math.nan))
    first, second = create(always(reply), logprobs=True, top_logprobs=5).choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("Hé", -0.5, [72, 195, 169])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("Hé", -0.5)]
    assert second.logprob == -9999.0  # unknown
    unknown = dataclasses.replace(HELLO, logprobs=None)
    assert create(always(unknown), logprobs=True).choices[0].logprobs is None


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_gives_the_whole_answer(usage: bool) -> None:
    reply = dataclasses.replace(HELLO, reasoning="Greet.", tool_calls=(LOOK, dataclasses.replace(LOOK, id="call_2")))
    options = {"stream_options": {"include_usage": True}} if usage else {}
    events = list(create(always(reply), stream=True, logprobs=True, **options))
    head, end = events[0].choices[0], events[1].choices[0]
    assert {event.id for event in events} == {"chatcmpl-7"}
    assert (head.delta.role, head.delta.content, head.delta.reasoning_content) == ("assistant", "Hello there", "Greet.")
    assert [(call.index, call.id) for call in head.delta.tool_calls] == [(0, "call_1"), (1, "call_2")]
    assert [token.token for token in head.logprobs.content] == ["Hello", " there"]
    assert (head.finish_reason, end.finish_reason, end.delta.content) == (None, "tool_calls", None)
    assert [event.usage and event.usage.total_tokens for event in events] == [None, None, *([5] if usage else [])]


def test_the_sdk_accumulates_a_stream_of_several_answers() -> None:
    served = always(HELLO, dataclasses.replace(HELLO, text="Bye", tool_calls=(LOOK,)))
    arguments: Any = {"model": "policy", "messages": HI, "n": 2, "tools": [SCHEMA]}
    with served.client(openai).chat.completions.stream(**arguments) as stream:
        completion = stream.get_final_completion()
    assert [choice.message.content for choice in completion.choices] == ["Hello there", "Bye"]
    assert completion.choices[1].message.tool_calls[0].function.arguments == '{"at": "door", "times": 2}'


class Place(BaseModel):
    at: str


def test_an_answer_in_json_is_parsed_by_the_sdk() -> None:
    served = always(dataclasses.replace(HELLO, text='{"at": "door"}'))
    completion = served.client(openai).chat.completions.parse(model="policy", messages=HI, response_format=Place)
    assert completion.choices[0].message.parsed == Place(at="door")
    create(served, response_format={"type": "json_object"})
    create(served, response_format={"type": "text"})


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
REJECTED = [
    ({"messages": []}, "messages", "messages must contain at least one message"),
    ({"messages": None}, "messages", "messages must contain at least one message"),
    ({"messages": "hi"}, "messages", "messages must be a list of messages, got 'hi'"),
    ({"model": None}, "model", "model is missing: it must be a string"),
    (
        {"messages": [*HI, {"role": "user", "content": 7}]},
        "messages[1].content",
        "messages[1].content must be a string or a list of parts, got 7",
    ),
    (
        {"messages": [{"role": "user", "content": IMAGE}]},
        "messages[0].content[0].type",
        "messages[0].content[0].type is 'image_url', but the policy reads text only: leave the part out",
    ),
    (
        {"messages": [{"role": "function", "content": "x"}]},
        "messages[0].role",
        "messages[0].role must be one of 'system', 'developer', 'user', 'assistant', 'tool', got 'function'",
    ),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "messages[0].tool_call_id is missing: it must be the id of a tool call",
    ),
    (
        {"tools": [SCHEMA], "tool_choice": "always"},
        "tool_choice",
        "tool_choice must be one of 'auto', 'none', 'required', 'any', 'function', 'tool', 'allowed_tools', or an "
        "object with such a type, got 'always'",
    ),
    ({"tools": [SCHEMA, SCHEMA]}, "tools", "two tools of the request are called 'look': rename one of them"),
    ({"functions": [SCHEMA["function"]]}, "functions", "functions is not supported: give them as tools"),
    ({"temperature": "hot"}, "temperature", "temperature must be a finite number, got 'hot'"),
    ({"n": 0}, "n", "n must be an int from 1 to 128, got 0"),
    ({"n": 2.0}, "n", "n must be an int from 1 to 128, got 2.0"),
    ({"n": 10**9}, "n", "n must be an int from 1 to 128, got 1000000000"),
    ({"max_tokens": True}, "max_tokens", "max_tokens must be a positive int, got True"),
    ({"stop": ["a", ""]}, "stop[1]", "stop[1] must be a non-empty string, got ''"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema is missing: it must be a JSON schema",
    ),
]


@pytest.mark.parametrize(("fields", "param", "sentence"), REJECTED, ids=[param for _, param, _ in REJECTED])
def test_a_request_that_cannot_be_served_is_rejected_with_a_sentence(fields: Any, param: str, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(always(HELLO), **fields)
    assert caught.value.body == {"message": sentence, "type": "invalid_request_error", "param": param, "code": None}


def test_an_error_keeps_its_status_and_code() -> None:
    error = CallError("the prompt has 9 tokens", status=503, code="context_length_exceeded")
    assert CHAT.error(error)["error"] == {
        "message": "the prompt has 9 tokens",
        "type": "server_error",
        "param": None,
        "code": "context_length_exceeded",
    }


@settings(max_examples=60, deadline=None)
@given(
    texts,
    turns(),
    st.sampled_from(
        [lambda message: message, lambda message: message.model_dump(), lambda m: m.model_dump(exclude_none=True)]
    ),
)
def test_what_the_sdk_sends_back_is_what_the_policy_answered(first: str, played: Any, dumped: Any) -> None:
    replies = iter([*played, (HELLO, [])])
    served = Served(lambda call: [next(replies)[0]])
    messages: list[Any] = [{"role": "user", "content": first}]
    for reply, output in played:
        message = create(served, messages=messages).choices[0].message
        messages.append(dumped(message))
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(message.tool_calls or (), output, strict=False)
        ]
        messages += results or [{"role": "user", "content": output[0]}]
        assert len(results) == len(reply.tool_calls)
    create(served, messages=messages)
    assert list(served.calls[-1].messages) == expected_messages(first, played)
