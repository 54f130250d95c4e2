"""Pydantic AI: chat completions, responses and Anthropic's messages; streams, and another agent as a tool."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, PromptedOutput, RunContext
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scripted import calls, play

from agentsgym.envs.AgentProgram import Endpoint

TASK = {"question": "Is it warm in Paris?", "answer": "21"}


def chat(endpoint: Endpoint) -> Any:
    return OpenAIChatModel("policy", provider=OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key))


def responses(endpoint: Endpoint) -> Any:
    return OpenAIResponsesModel("policy", provider=OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key))


def anthropic(endpoint: Endpoint) -> Any:
    url = endpoint.base_url.removesuffix("/v1")
    return AnthropicModel("policy", provider=AnthropicProvider(base_url=url, api_key=endpoint.api_key))


def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return f"{city}: 21 degrees"


@pytest.mark.parametrize("model", [chat, responses, anthropic])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_with_a_tool_is_one_conversation(model: Any, is_streamed: bool) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = Agent(model(endpoint), instructions="Be brief.", tools=[temperature])
        if is_streamed:
            async with agent.run_stream(task["question"]) as result:
                output = "".join([text async for text in result.stream_text(delta=True)])
        else:
            result = await agent.run(task["question"])
            output = result.output
        for message in result.all_messages():
            if message.kind == "response":
                endpoint.reward(0.25, message.provider_response_id)
        return float(task["answer"] in output)

    spoken = "" if is_streamed else "I look.\n"  # in a stream, the first text is the result, whatever follows it
    one = play(program, TASK, spoken + calls("temperature", city="Paris"), "Yes, 21 degrees.")
    assert one.info["num_conversations"] == 1
    assert one.turn_rewards == [0.25, 1.25]
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert one.messages[3]["content"] == "Paris: 21 degrees"


@pytest.mark.parametrize("model", [chat, responses, anthropic])
def test_a_second_run_continues_the_conversation(model: Any) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = Agent(model(endpoint), instructions="Be brief.", tools=[temperature])
        first = await agent.run(task["question"])
        second = await agent.run("Thanks.", message_history=first.all_messages())
        return float(second.output == "Bye.")

    both = calls("temperature", city="Paris") + "\n" + calls("temperature", city="Rome")
    one = play(program, TASK, both, "Yes.", "Bye.")
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


@pytest.mark.parametrize("model", [chat, responses, anthropic])
def test_an_answer_is_parsed_into_a_type(model: Any) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = Agent(model(endpoint), tools=[temperature], output_type=PromptedOutput(Report))
        result = await agent.run(task["question"])
        return float(result.output == Report(city="Paris", degrees=21))

    one = play(program, TASK, calls("temperature", city="Paris"), '{"city": "Paris", "degrees": 21}')
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)


@pytest.mark.parametrize("model", [chat, responses, anthropic])
def test_the_answer_is_a_call_of_the_output_tool(model: Any) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = Agent(model(endpoint), tools=[temperature], output_type=Report)
        result = await agent.run(task["question"])
        return float(result.output == Report(city="Paris", degrees=21))

    one = play(program, TASK, calls("temperature", city="Paris"), calls("final_result", city="Paris", degrees=21))
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)


def test_an_agent_that_calls_another_one_is_two_conversations() -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        expert = Agent(chat(endpoint), instructions="You know temperatures.", tools=[temperature])
        desk = Agent(chat(endpoint), instructions="Ask the expert.")

        @desk.tool
        async def ask_expert(context: RunContext, question: str) -> str:
            """Ask the expert."""
            return (await expert.run(question, usage=context.usage)).output

        return float(task["answer"] in (await desk.run(task["question"])).output)

    answers = [calls("ask_expert", question="How warm is Paris?"), calls("temperature", city="Paris"), "It is 21."]
    one = play(program, TASK, *answers, "Yes, 21 degrees.")
    assert (one.info["num_conversations"], one.final_reward) == (2, 1.0)
    assert [turn.parent for turn in one.turns] == [None, 0, 1, 0]
