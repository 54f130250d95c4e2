"""LangGraph's agent with LangChain's OpenAI model: both APIs, streams, structured answers, a graph of two agents."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel
from scripted import calls, play

from agentsgym.envs.AgentProgram import Endpoint

TASK = {"question": "Is it warm in Paris?", "answer": "21"}
pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent")


def model_of(endpoint: Endpoint, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


@tool
def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return f"{city}: 21 degrees"


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"use_responses_api": True}], ids=str)
def test_an_agent_with_a_tool_is_one_conversation(options: dict[str, Any]) -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = create_react_agent(model_of(endpoint, **options), [temperature], prompt="Be brief.")
        state = agent.invoke({"messages": [("user", task["question"])]})
        for message in state["messages"]:
            if message.type == "ai" and message.response_metadata.get("id"):  # unknown if the answer was streamed
                endpoint.reward(0.25, message.response_metadata["id"])
        return float(task["answer"] in state["messages"][-1].text)

    one = play(program, TASK, "I look.\n" + calls("temperature", city="Paris"), "Yes, 21 degrees.")
    assert one.info["num_conversations"] == 1
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert one.messages[3]["content"] == "Paris: 21 degrees"
    assert one.turn_rewards == ([0.0, 1.0] if "streaming" in options else [0.25, 1.25])


@pytest.mark.parametrize("mode", ["messages", "values"])
def test_a_coroutine_streams_the_states_or_tokens_of_an_agent(mode: Any) -> None:
    async def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        agent = create_react_agent(model_of(endpoint), [temperature])
        events = [event async for event in agent.astream({"messages": [("user", task["question"])]}, stream_mode=mode)]
        last = events[-1][0] if mode == "messages" else events[-1]["messages"][-1]
        return float(task["answer"] in last.content or mode == "messages")

    both = calls("temperature", city="Paris") + "\n" + calls("temperature", city="Rome")
    one = play(program, TASK, both, "Yes, 21 degrees.")
    assert (one.info["num_conversations"], one.final_reward) == (1, 1.0)


class Report(BaseModel):
    """A report."""

    city: str
    degrees: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_an_answer_is_parsed_into_a_type(method: Any) -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = model_of(endpoint).with_structured_output(Report, method=method)
        return float(model.invoke(task["question"] + " Answer in JSON.") == Report(city="Paris", degrees=21))

    is_call = method == "function_calling"
    answer = calls("Report", city="Paris", degrees=21) if is_call else '{"city": "Paris", "degrees": 21}'
    assert play(program, TASK, answer).final_reward == 1.0


def test_a_graph_of_two_agents_is_two_conversations() -> None:
    def program(task: dict[str, Any], endpoint: Endpoint) -> float:
        model = model_of(endpoint)

        def plan(state: MessagesState) -> Any:
            return {"messages": [model.invoke([("system", "Write a plan."), *state["messages"]])]}

        def act(state: MessagesState) -> Any:
            return {"messages": [model.invoke([("user", f"Follow this plan: {state['messages'][-1].content}")])]}

        graph = StateGraph(MessagesState)
        graph.add_node("plan", plan)
        graph.add_node("act", act)
        graph.add_edge(START, "plan")
        graph.add_edge("plan", "act")
        graph.add_edge("act", END)
        state = graph.compile().invoke({"messages": [("user", task["question"])]})
        return float(task["answer"] in state["messages"][-1].content)

    one = play(program, TASK, "Look at the thermometer.", "It is 21.")
    assert (one.info["num_conversations"], one.final_reward) == (2, 1.0)
    assert [turn.parent for turn in one.turns] == [None, 0]
