"""Text completions, called with OpenAI's SDK."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import openai
import pytest
from dialect_clients import HELLO, Served, always


def create(served: Served, **fields: Any) -> Any:
    return served.client(openai).completions.create(**{"model": "policy", "prompt": "Say:", **fields})


def test_an_answer_is_read_by_the_sdk() -> None:
    served = always(HELLO)
    completion = create(served, max_tokens=4, stop="\n", temperature=0, extra_body={"return_token_ids": True})
    (choice,) = completion.choices
    assert (completion.id, choice.text, choice.finish_reason, choice.logprobs) == (
        "cmpl-7",
        "Hello there",
        "stop",
        None,
    )
    assert completion.usage.total_tokens == 5
    assert completion.agentsgym["calls"][0]["token_ids"] == [4, 5]
    (call,) = served.calls
    assert (call.prompt, call.messages, call.max_new_tokens, call.stop) == ("Say:", (), 4, ("\n",))


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", "a"), (["a"], "a"), ([5, 0], [5, 0]), ([[5, 0]], [5, 0])],
    ids=["text", "texts", "ids", "lists"],
)
def test_a_prompt_is_a_text_or_token_ids(prompt: Any, parsed: Any) -> None:
    served = always(HELLO)
    create(served, prompt=prompt)
    assert served.calls[0].prompt == parsed


def test_several_answers_share_a_response() -> None:
    served = always(HELLO, dataclasses.replace(HELLO, call_id="9", text="Good", finish_reason="length"))
    choices = create(served, n=2).choices
    assert [(choice.index, choice.text, choice.finish_reason) for choice in choices] == [
        (0, "Hello there", "stop"),
        (1, "Good", "length"),
    ]


def test_log_probabilities_are_those_of_the_sampled_tokens() -> None:
    logprobs = create(always(dataclasses.replace(HELLO, logprobs=(-0.5, math.nan))), logprobs=0).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["Hello", " there"], [0, 5])
    assert logprobs.token_logprobs == [-0.5, -9999.0]
    assert logprobs.top_logprobs == [{"Hello": -0.5}, {" there": -9999.0}]


def test_a_stream_gives_the_whole_answer() -> None:
    served = always(HELLO, dataclasses.replace(HELLO, text="Bye"))
    events = list(create(served, n=2, stream=True, logprobs=1, stream_options={"include_usage": True}))
    assert [(one.index, one.text, one.finish_reason) for event in events for one in event.choices] == [
        (0, "Hello there", "stop"),
        (1, "Bye", "stop"),
    ]
    assert events[0].choices[0].logprobs.tokens == ["Hello", " there"]
    assert [event.usage and event.usage.completion_tokens for event in events] == [None, None, 4]


REJECTED = [
    ({"prompt": ["a", "b"]}, "prompt", "prompt must be one prompt, got 2: send a request for each"),
    ({"prompt": [[1], [2]]}, "prompt", "prompt must be one prompt, got 2: send a request for each"),
    ({"prompt": ""}, "prompt", "prompt must be a non-empty string or list of token ids, got ''"),
    ({"prompt": [1, -1]}, "prompt", "prompt must be a non-empty string or list of token ids, got [1, -1]"),
    ({"prompt": [1, "a"]}, "prompt", "prompt must be a non-empty string or list of token ids, got [1, 'a']"),
    ({"echo": True}, "echo", "echo is not supported: the program has the prompt already"),
    ({"suffix": "."}, "suffix", "suffix is not supported: the policy only continues a text"),
    ({"best_of": 3}, "best_of", "best_of must be 1, since each answer is returned: give n, got 3"),
    ({"logprobs": -1}, "logprobs", "logprobs must be an int of at least 0, got -1"),
]


@pytest.mark.parametrize(("fields", "param", "sentence"), REJECTED)
def test_a_request_that_cannot_be_served_is_rejected_with_a_sentence(fields: Any, param: str, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(always(HELLO), **fields)
    assert caught.value.body == {"message": sentence, "type": "invalid_request_error", "param": param, "code": None}
