"""smolagents, whose agents rewrite their history: each call is a segment of its own."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import calls, play
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

from agentsgym.envs.AgentProgram import Endpoint

TASK = {"question": "Is it warm in Paris?", "answer": "21"}


@tool
def temperature(city: str) -> str:
    """Return the temperature in a city.

    Args:
        city: The city's name.
    """
    return f"{city}: 21 degrees"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_calling_agent(is_streamed: bool) -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        agent = ToolCallingAgent(
            tools=[temperature], model=model, stream_outputs=is_streamed, verbosity_level=LogLevel.OFF
        )
        return float(task["answer"] in agent.run(task["question"]))

    one = play(program, TASK, calls("temperature", city="Paris"), calls("final_answer", answer="21 degrees"))
    assert one.final_reward == 1.0
    assert one.info["num_conversations"] == 2
    assert one.turns[1].parent == 0
    assert "Paris: 21 degrees" in one.turns[1].prompt_messages[-1]["content"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_code_agent(is_streamed: bool) -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        agent = CodeAgent(tools=[temperature], model=model, stream_outputs=is_streamed, verbosity_level=LogLevel.OFF)
        return float(task["answer"] in str(agent.run(task["question"])))

    looks = "Thought: I look.\n<code>\nseen = temperature('Paris')\nprint(seen)\n</code>"
    one = play(program, TASK, looks, "Thought: done.\n<code>\nfinal_answer(seen)\n</code>", is_cut=True)
    assert one.final_reward == 1.0
    assert one.info["num_conversations"] == 2


def test_a_managed_agent() -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        options: dict[str, Any] = {"model": model, "verbosity_level": LogLevel.OFF}
        expert = ToolCallingAgent(tools=[temperature], name="expert", description="Knows temperatures.", **options)
        agent = ToolCallingAgent(tools=[], managed_agents=[expert], **options)
        return float(task["answer"] in agent.run(task["question"]))

    one = play(
        program,
        TASK,
        calls("expert", task="How warm is Paris?"),
        calls("temperature", city="Paris"),
        calls("final_answer", answer="21 degrees"),
        calls("final_answer", answer="21"),
    )
    assert (one.info["num_conversations"], one.final_reward) == (4, 1.0)
    assert [turn.parent for turn in one.turns][:2] == [None, 0]
