"""Anthropic's SDK: a loop with tools that a user writes, and the SDK's own tool runner."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from scripted import calls, play

from agentsgym.envs.AgentProgram import Endpoint

TASK = {"question": "Is it warm in Paris?", "answer": "21"}


@anthropic.beta_tool
def temperature(city: str) -> str:
    """Return the temperature in a city.

    Args:
        city: The city's name.
    """
    return f"{city}: 21 degrees"


def client_of(endpoint: Endpoint) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=endpoint.base_url.removesuffix("/v1"), api_key=endpoint.api_key)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_loop_with_a_tool_is_one_conversation(is_streamed: bool) -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        client, messages = client_of(endpoint), [{"role": "user", "content": task["question"]}]
        tools = [temperature.to_dict()]
        while True:
            options: dict[str, Any] = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": tools}
            if is_streamed:
                with client.messages.stream(**options) as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**options)
            endpoint.reward(0.25, answer.id)
            if answer.stop_reason != "tool_use":
                return float(task["answer"] in answer.content[0].text)
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": temperature(**block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]

    both = calls("temperature", city="Paris") + "\n" + calls("temperature", city="Rome")
    one = play(program, TASK, f"I look.\n{both}", "Yes, 21 degrees.")
    assert (one.info["num_conversations"], one.turn_rewards) == (1, [0.25, 1.25])


def test_the_tool_runner_is_one_conversation() -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        runner = client_of(endpoint).beta.messages.tool_runner(
            model="policy",
            max_tokens=200,
            tools=[temperature],
            messages=[{"role": "user", "content": task["question"]}],
        )
        return float(task["answer"] in runner.until_done().content[0].text)

    one = play(program, TASK, calls("temperature", city="Paris"), "Yes, 21 degrees.")
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)
