"""OpenAIAgent with tools: what is sent, which calls come back, and whole episodes over a real HTTP server."""

import json
from typing import Any

import pytest
from http_server import Asked, Reply, Served, calling, chat
from tool_game import SumEnv

from agentsgym import Action, ConfigError, Message, OpenAIAgent, ScriptedAgent, ToolCall, TurnRequest
from agentsgym.agents.openai import as_sent
from agentsgym.envs import SearchEnv
from agentsgym.testing import chat_tokenizer

SCHEMAS = SumEnv().tool_schemas


def call(name: str, arguments: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_to(reply: Reply) -> tuple[Any, Served]:
    with calling(lambda requested: reply, max_retries=1) as (agent, served):
        messages: list[Message] = [{"role": "user", "content": "?"}]
        (answer,) = agent.act([TurnRequest(session_id="s", messages=messages, token_ids=(), tools=SCHEMAS)])
    return answer, served


def calculator(requested: Asked) -> Reply:
    """Calls the tool, then names what it gave."""
    last = requested.body["messages"][-1]
    if last["content"] == "5":
        return chat(last["content"])
    return chat(None, finish_reason="tool_calls", tool_calls=[call("add", '{"a": 2, "b": 3}')])


def test_tools_are_sent_and_an_answer_of_calls_alone_is_no_empty_answer() -> None:
    thought = {"reasoning_content": "Add them."}
    answer, served = answer_to(chat(None, finish_reason="tool_calls", tool_calls=[call("add", '{"a": 2}')], **thought))
    expected = (ToolCall(name="add", arguments={"a": 2}, id="c1"),)
    assert answer == Action(text="", tool_calls=expected, reasoning="Add them.")
    assert [requested.body["tools"] for requested in served.requested] == [list(SCHEMAS)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (call("add", '{"a": 2, "b": 3}'), ToolCall(name="add", arguments={"a": 2, "b": 3}, id="c1")),
        (call("add", {"a": 2}), ToolCall(name="add", arguments={"a": 2}, id="c1")),
        (call("add", ""), ToolCall(name="add", id="c1")),
        (call("add", None, None), ToolCall(name="add")),
        (call("add", '{"a": 2'), "the call is not valid JSON: Expecting ',' delimiter"),
        (call("add", '{"a": NaN}'), "NaN is not a JSON number"),
        (call("add", "[2, 3]"), "the call of 'add' has arguments that are a list"),
        (call("add", '{"a": 1, "a": 2}'), "the call gives 'a' twice"),
        (call("add", "[" * 5000), "the call is"),
        (call("", "{}"), "the call has no name"),
    ],
)
def test_each_call_is_read_and_a_malformed_one_gives_the_reason(given: Any, expected: ToolCall | str) -> None:
    answer, _ = answer_to(chat("Hm.", finish_reason="tool_calls", tool_calls=[given, call("add", "{}", "c2")]))
    first, second = answer.tool_calls
    assert second == ToolCall(name="add", id="c2")
    assert answer.text == "Hm."
    if isinstance(expected, ToolCall):
        assert first == expected
    else:
        assert (first.id, expected in first.error) == ("c1", True)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("add", "tool_calls that are not a list"),
        ([7], "a tool call without a function: 7"),
        ([{"id": "c1", "function": "add"}], "a tool call without a function"),
    ],
)
def test_an_answer_whose_calls_are_none_is_requested_again_and_then_fails(calls: Any, message: str) -> None:
    answer, served = answer_to(chat(None, tool_calls=calls))
    assert message in str(answer)
    assert len(served.requested) == 2


def test_calls_that_the_budget_cut_are_none() -> None:
    answer, _ = answer_to(chat(None, finish_reason="length", tool_calls=[call("add", '{"a": 2}')]))
    assert (answer.tool_calls, answer.finish_reason) == ((), "length")


def test_an_episode_with_calls_is_played_and_what_is_sent_is_openais_form() -> None:
    with calling(calculator) as (agent, served):
        (trajectory,) = SumEnv().rollout([{}], agent)
    assert (trajectory.success, trajectory.final_reward, trajectory.num_turns) == (True, 1.0, 2)
    first, second = [requested.body for requested in served.requested]
    assert first["messages"] == [{"role": "user", "content": "What is 2 + 3?"}]
    assert first["tools"] == second["tools"] == list(SCHEMAS)
    assert {key for message in second["messages"] for key in message} <= {
        "role", "content", "tool_calls", "tool_call_id",
    }  # fmt: skip


def test_calls_that_a_server_leaves_in_the_text_are_read_there() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    with calling(lambda requested: chat("5" if len(requested.body["messages"]) > 1 else text)) as (agent, _):
        (trajectory,) = SumEnv().rollout([{}], agent)
    assert trajectory.success is True
    assert [len(action.tool_calls) for action in trajectory.info["seen"]] == [1, 0]


def test_an_environment_with_a_tokenizer_plays_with_text_where_the_server_gives_no_ids() -> None:
    with calling(calculator, token_ids=False) as (agent, _):
        (trajectory,) = SumEnv(chat_tokenizer()).rollout([{}], agent)
    assert (trajectory.error, trajectory.success) == (None, True)


def test_a_conversation_is_sent_in_openais_form() -> None:
    calls = [{"type": "function", "id": "x", "function": {"name": "add", "arguments": {"a": "é"}}}, call("add", "{}")]
    unnamed = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "x"},
        {"role": "assistant", "content": "", "tool_calls": [unnamed, unnamed]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "<tool_call>{</tool_call>"},
        {"role": "tool", "content": "the call is not valid JSON"},
    ]
    before = json.dumps(messages)
    assert as_sent(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "Hm.",
            "tool_calls": [call("add", '{"a": "é"}', "x"), call("add", "{}", "c1")],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("add", "{}", "call_5_0"), call("add", "{}", "call_5_1")],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_5_0"},
        {"role": "tool", "content": "4", "tool_call_id": "call_5_1"},
        {"role": "assistant", "content": "<tool_call>{</tool_call>"},
        {"role": "user", "content": "the call is not valid JSON"},
    ]
    assert json.dumps(messages) == before


def test_results_are_sent_right_behind_their_calls() -> None:
    answer: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("add", "{}", "x"), call("add", "{}", "y")],
    }
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        answer,
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "x"},
        {"role": "user", "content": "a call could not be read"},
        {"role": "tool", "content": "no call of yours", "tool_call_id": "z"},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "y"},
        {"role": "user", "content": "go on"},
    ]
    sent = as_sent(messages)
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in sent[2:]] == [
        ("tool", "x", "1"),
        ("tool", "y", "2"),
        ("user", None, "a call could not be read"),
        ("user", None, "no call of yours"),
        ("user", None, "go on"),
    ]


def test_a_malformed_call_between_searches_leaves_the_conversation_legal() -> None:
    requested: list[list[dict[str, Any]]] = []

    class Calling(ScriptedAgent):
        def act(self, requests: Any) -> Any:
            requested.extend(as_sent(request.messages) for request in requests)
            good = [ToolCall(name="search", arguments={"query": "Ada"}, id=call_id) for call_id in ("a", "b")]
            bad = ToolCall(name="search", error="the call is not valid JSON", id="bad")
            return [Action(text="Ada", tool_calls=[good[0], bad, good[1]] if len(requested) == 1 else ())]

    env = SearchEnv(env_config={"corpus": [{"text": "Ada wrote."}]})
    (trajectory,) = env.rollout([{"question": "Who?", "answers": ["Ada"]}], Calling(["x"]))
    assert (trajectory.error, trajectory.success) == (None, True)
    roles = [message["role"] for message in requested[1]]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    assert [message["tool_call_id"] for message in requested[1][3:5]] == ["a", "b"]
    assert requested[1][4]["content"].endswith("A call could not be read: the call is not valid JSON")


def test_tools_are_the_environments_to_give() -> None:
    with pytest.raises(ConfigError, match="extra_body must not contain"):
        OpenAIAgent("tiny", base_url="http://localhost:1/v1", extra_body={"tools": []})
