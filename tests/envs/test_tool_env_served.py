"""A whole ToolEnv episode over an OpenAI-compatible server: results go back as role ``tool`` under their calls' ids."""

from typing import Any

from http_server import Asked, Reply, chat, serving
from packaged import add, spell

from agentsgym.agents.openai import OpenAIAgent
from agentsgym.envs.Tools import ToolEnv

TASK = {"question": "What is 2 + 3, and how is it spelled?", "answer": "5"}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TURNS = [
    [call("a7", "add", '{"a": 2, "b": 3}'), call("b1", "spell", '{"word": "five"}')],
    [call("c9", "spell", '{"word": "fünf"}'), call("d2", "add", '{"a": 2, '), call("e4", "divide", "{}")],
]


def model(requested: Asked) -> Reply:
    """Makes the calls of each turn, then answers."""
    turn = sum(message["role"] == "assistant" for message in requested.body["messages"])
    if turn < len(TURNS):
        return chat(None, finish_reason="tool_calls", tool_calls=TURNS[turn])
    return chat("5")


def test_results_go_back_under_the_ids_of_their_calls() -> None:
    with serving(model) as served:
        agent = OpenAIAgent("tiny", base_url=served.url)
        env = ToolEnv(tools=[add, spell])
        [trajectory] = env.rollout([TASK], agent)
        agent.close()
        env.close()
    assert (trajectory.error, trajectory.success) == (None, True)
    counts = {name: trajectory.info[name] for name in ("num_calls", "num_failed_calls", "num_unreadable_calls")}
    assert counts == {"num_calls": 3, "num_failed_calls": 2, "num_unreadable_calls": 1}
    assert [requested.body["tools"] for requested in served.requested] == [list(env.tool_schemas)] * 3
    sent = served.requested[-1].body["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"] == TURNS[0]
    assert sent[2:4] == [
        {"role": "tool", "tool_call_id": "a7", "content": "5"},
        {"role": "tool", "tool_call_id": "b1", "content": '["F", "I", "V", "E"]'},
    ]
    assert [one["id"] for one in sent[4]["tool_calls"]] == ["c9", "e4"]  # one that could not be read is no call
    refused, unknown = sent[5:]
    assert (refused["tool_call_id"], unknown["tool_call_id"]) == ("c9", "e4")
    assert refused["content"] == "Error: only ASCII letters are spelled (ValueError)"
    assert unknown["content"].startswith("Error: there is no tool 'divide'")
    assert "A call could not be read: " in unknown["content"]
