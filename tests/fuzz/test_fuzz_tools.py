"""Tool schemas, the text in which models write calls, tokens, and recorded conversations."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import numpy as np
from chat_families import TRL_TEMPLATES, tokenizer_for
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from values import anything, floats, ints, plain, texts

import agentsgym
from agentsgym import Action, AgentsGymError, ToolCall, Trajectory
from agentsgym.envs import PriceListEnv
from agentsgym.envs.tool_schemas import check_call, schemas_of
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat

_WORDS = [
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "anyOf",
    "$ref",
    "$defs",
    "description",
    "nullable",
    "minimum",
    "maximum",
    "minLength",
    "pattern",
    "additionalProperties",
    "name",
    "function",
    "parameters",
    "a",
]
_values = (
    st.sampled_from(
        [
            "object",
            "string",
            "integer",
            "array",
            "number",
            "null",
            "#/$defs/a",
            "#",
            "[",
            ["string", "null"],
            ["a"],
            {},
            [],
            "(a+)+$",
        ]
    )
    | plain
)
_parts = st.recursive(
    _values,
    lambda inner: st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=10,
)
_schemas = st.one_of(
    st.fixed_dictionaries({"name": st.just("f") | _values, "parameters": _parts}, optional={"description": _values}),
    st.fixed_dictionaries(
        {
            "type": st.just("function") | _values,
            "function": st.fixed_dictionaries({"name": st.just("f"), "parameters": _parts}),
        }
    ),
    st.builds(
        lambda part: {"name": "f", "parameters": {"type": "object", "properties": {"a": part}, "$defs": {"a": part}}},
        _parts,
    ),
    anything,
)


@fuzzed(1000)
@given(
    st.lists(_schemas, max_size=2) | anything,
    st.dictionaries(st.sampled_from(["a", "b"]) | texts, anything, max_size=2),
)
def test_schemas(tools: Any, arguments: dict[str, Any]) -> None:
    schemas = survives(schemas_of, tools, "the test")
    if isinstance(schemas, tuple):
        json.dumps(schemas)
        error = survives(check_call, ToolCall(name="f", arguments=arguments), schemas)
        assert error is None or isinstance(error, str)


_PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[{",
    "}]",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "add(a=1, b=",
    ")",
    "<|python_tag|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "\n",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "<|im_end|>",
    "</s>",
    "9" * 5000,
    "[" * 3000,
    "\\ud800",
    "\x00",
    "call:add{a:",
    "<escape>",
    "'''",
    '"""',
    "{" * 500,
    "functions.add:0",
    "<|tool_call_begin|>",
]


@cache
def _format(name: str) -> Any:
    return ChatFormat.of(tokenizer_for(TRL_TEMPLATES[name]), append=False, tools=PriceListEnv().tool_schemas)


@cache
def _names() -> list[str]:
    names: list[str] = []
    for name in TRL_TEMPLATES:
        try:
            _format(name)
        except AgentsGymError:
            continue
        names.append(name)
    return names


@fuzzed(500)
@given(st.data(), st.lists(st.sampled_from(_PIECES) | texts, max_size=8), st.booleans())
def test_texts_of_calls(data: st.DataObject, pieces: list[str], are_ids: bool) -> None:
    chat_format = _format(data.draw(st.sampled_from(_names())))
    text = "".join(pieces)
    ids = None
    if are_ids:
        ids = data.draw(st.lists(st.integers(0, 200), max_size=12))
    found = survives(read_answer, Action(text=text, token_ids=ids), chat_format, PriceListEnv().tool_schemas)
    assert isinstance(found, Action)


_ids = st.lists(
    st.integers(0, 300) | ints | floats | st.booleans() | st.sampled_from([np.int64(3), "3", None, [1], 2**31, -1]),
    max_size=5,
)


class _Samples(agentsgym.Agent):
    def __init__(self, ids: Any, logprobs: Any, text: Any) -> None:
        self._given = ids, logprobs, text

    def act(self, requests: Any) -> Any:
        ids, logprobs, text = self._given
        return [Action(text=text, token_ids=ids, logprobs=logprobs) for _ in requests]


@fuzzed(80)
@given(
    _ids | anything, st.none() | st.lists(floats | anything, max_size=5) | anything, texts | st.just("x" * 1_000_000)
)
def test_tokens(ids: Any, logprobs: Any, text: str) -> None:
    config = {"max_steps_per_episode": 2, "max_trajectory_tokens": 3000}
    env = PriceListEnv(tokenizer_for(TRL_TEMPLATES["qwen3"]), config)
    found = survives(env.rollout, env.get_train_dataset(size=1), _Samples(ids, logprobs, text))
    if isinstance(found, list):
        report = agentsgym.audit(found)
        assert report.ok, report


_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "t", "tool_call_id": "1"},
    {"role": "assistant", "content": "b"},
]


@st.composite
def _conversations(draw: st.DrawFn) -> Any:
    messages = copy.deepcopy(_MESSAGES)
    for _ in range(draw(st.integers(0, 2))):
        message = draw(st.sampled_from(messages))
        if isinstance(message, dict):
            message[
                draw(st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name"]))
            ] = draw(anything)
    if draw(st.booleans()):
        messages.insert(draw(st.integers(0, 5)), draw(st.sampled_from(_MESSAGES) | anything))
    return messages if draw(st.integers(0, 9)) else draw(anything)


_options = st.dictionaries(
    st.sampled_from(
        ["tools", "task_data", "info", "final_reward", "session_id", "stop_reason", "turn_credit", "history", "x"]
    ),
    anything,
    max_size=2,
)


@fuzzed(500)
@given(
    _conversations(),
    st.just([0.0, 1.0]) | st.just(1.0) | anything,
    _options,
    st.sampled_from(["none", "qwen3", "llama3"]),
)
def test_recorded_conversations(messages: Any, rewards: Any, options: dict[str, Any], name: str) -> None:
    tokenizer = tokenizer_for(TRL_TEMPLATES[name]) if name in TRL_TEMPLATES else None
    survives(Trajectory.from_messages, tokenizer, messages, rewards, **options)
    survives(agentsgym.trajectories_from_messages, tokenizer, [{"messages": messages, "rewards": rewards, **options}])
    survives(agentsgym.trajectories_from_messages, tokenizer, messages)
