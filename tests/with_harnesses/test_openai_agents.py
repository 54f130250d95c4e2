"""OpenAI's Agents SDK: the API of responses, chat completions, streams, handoffs and agents as tools."""

from __future__ import annotations

from typing import Any

import agents
import pytest
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI
from pydantic import BaseModel
from scripted import calls, play

from agentsgym.envs.AgentProgram import Endpoint

agents.set_tracing_disabled(True)
TASK = {"question": "Is it warm in Paris?", "answer": "21"}


@agents.function_tool
def temperature(city: str) -> str:
    """Return the temperature in a city.

    Args:
        city: The city's name.
    """
    return f"{city}: 21 degrees"


def model_of(endpoint: Endpoint, kind: Any = OpenAIResponsesModel) -> Any:
    return kind(endpoint.model, AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key))


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_with_a_tool_is_one_conversation(kind: Any, is_streamed: bool) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = agents.Agent(
            name="Guide", instructions="Be brief.", model=model_of(endpoint, kind), tools=[temperature]
        )
        if is_streamed:
            result = Runner.run_streamed(agent, task["question"])
            kinds = [event.type async for event in result.stream_events()]
            assert "run_item_stream_event" in kinds
        else:
            result = await Runner.run(agent, task["question"])
        endpoint.reward({"brief": 0.5})
        return float(task["answer"] in result.final_output)

    one = play(program, TASK, calls("temperature", city="Paris"), "Yes, 21 degrees.")
    assert one.info["num_conversations"] == 1
    assert one.turn_rewards == [0.0, 1.5]
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert one.messages[3]["content"] == "Paris: 21 degrees"


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
def test_several_calls_and_turns_of_a_user_are_one_conversation(kind: Any) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = agents.Agent(name="Guide", model=model_of(endpoint, kind), tools=[temperature])
        first = await Runner.run(agent, "Compare Paris and Rome.")
        for response in first.raw_responses:
            endpoint.reward(0.25, response.response_id)
        again = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And Oslo?"}])
        return float("as warm" in again.final_output)

    both = calls("temperature", city="Paris") + "\n" + calls("temperature", city="Rome")
    one = play(program, TASK, f"I compare.\n{both}", "Alike.", calls("temperature", city="Oslo"), "Oslo is as warm.")
    assert one.info["num_conversations"] == 1
    assert [message["content"] for message in one.messages if message["role"] == "tool"] == [
        "Paris: 21 degrees",
        "Rome: 21 degrees",
        "Oslo: 21 degrees",
    ]
    if kind is OpenAIResponsesModel:  # the other model does not report the ids of its calls
        assert one.turn_rewards == [0.25, 0.25, 0.0, 1.0]


def test_a_conversation_is_continued_by_the_id_of_the_last_response() -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = agents.Agent(name="Guide", instructions="Be brief.", model=model_of(endpoint), tools=[temperature])
        result = await Runner.run(agent, task["question"], auto_previous_response_id=True)
        again = await Runner.run(agent, "Thanks.", previous_response_id=result.last_response_id)
        return float(again.final_output == "Bye.")

    one = play(program, TASK, calls("temperature", city="Paris"), "Yes.", "Bye.")
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)


def test_a_handoff_begins_a_conversation_that_follows_the_first() -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = model_of(endpoint)
        expert = agents.Agent(name="Expert", instructions="You know temperatures.", model=model, tools=[temperature])
        desk = agents.Agent(name="Desk", instructions="Hand off.", model=model, handoffs=[expert])
        result = await Runner.run(desk, task["question"])
        assert result.last_agent.name == "Expert"
        return float(task["answer"] in result.final_output)

    one = play(program, TASK, calls("transfer_to_expert"), calls("temperature", city="Paris"), "21 degrees.")
    assert one.info["num_conversations"] == 2
    assert one.turns[0].prompt_start == 0
    assert one.turns[1].prompt_start == one.turns[2].prompt_start > 0
    assert [turn.parent for turn in one.turns] == [None, 0, 1]


def test_an_agent_that_is_a_tool_has_a_conversation_of_its_own() -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = model_of(endpoint)
        expert = agents.Agent(name="Expert", instructions="You know temperatures.", model=model, tools=[temperature])
        tool = expert.as_tool(tool_name="ask_expert", tool_description="Ask about a city.")
        desk = agents.Agent(name="Desk", instructions="Ask the expert.", model=model, tools=[tool])
        result = await Runner.run(desk, task["question"])
        return float(task["answer"] in result.final_output)

    answers = [calls("ask_expert", input="How warm is Paris?"), calls("temperature", city="Paris"), "It is 21."]
    one = play(program, TASK, *answers, "Yes, 21 degrees.")
    assert one.info["num_conversations"] == 2
    starts = [turn.prompt_start for turn in one.turns]
    assert starts[1] == starts[2]
    assert [turn.parent for turn in one.turns] == [None, 0, 1, 0]
    assert one.turns[1].prompt_messages[1] == {"role": "user", "content": "How warm is Paris?"}


def test_an_answer_is_parsed_into_a_type() -> None:
    class Report(BaseModel):
        city: str
        degrees: int

    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = agents.Agent(name="Guide", model=model_of(endpoint), tools=[temperature], output_type=Report)
        result = await Runner.run(agent, task["question"])
        return float(result.final_output == Report(city="Paris", degrees=21))

    one = play(program, TASK, calls("temperature", city="Paris"), '{"city": "Paris", "degrees": 21}')
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)
