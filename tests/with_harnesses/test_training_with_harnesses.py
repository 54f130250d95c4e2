"""A tiny policy is trained by policy gradient through each harness, call by call."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agents
import pytest
import torch
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from datasets import Dataset
from games import logged, settings
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from scripted import TOKENIZER, calls
from smolagents import CodeAgent, LogLevel, OpenAIModel

from agentsgym import Agent, GRPOEnvTrainer, imitate
from agentsgym.envs.AgentProgram import AgentProgramEnv, Endpoint, ProgramOutcome
from agentsgym.tiny import tiny_model, tiny_policy
from agentsgym.training import tiny_imitation_config
from agentsgym.types import Trajectory

agents.set_tracing_disabled(True)
pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent")
CITIES = {"Paris": 21, "Rome": 27, "Oslo": 4, "Cairo": 33}


def vowels(text: str) -> float:
    """Return the share of vowels, a reward that even a random policy can raise."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def temperature(city: str) -> str:
    """Return the temperature in a city.

    Args:
        city: The city's name.
    """
    return f"{CITIES[city]} degrees" if city in CITIES else "unknown"


async def with_openai_agents(task: dict[str, Any], endpoint: Endpoint, kind: Any = OpenAIResponsesModel) -> str:
    model = kind(endpoint.model, AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key))
    agent = agents.Agent(name="Guide", model=model, tools=[agents.function_tool(temperature)])
    try:
        result = await Runner.run(agent, task["question"])
    except (agents.ModelBehaviorError, agents.MaxTurnsExceeded):  # such as an answer that is cut at the token budget
        endpoint.reward({"short": 0.0})
        return ""
    for response in result.raw_responses:
        endpoint.reward({"short": 0.01}, response.response_id)
    return str(result.final_output)


async def with_openai_agents_chat(task: dict[str, Any], endpoint: Endpoint) -> str:
    return await with_openai_agents(task, endpoint, OpenAIChatCompletionsModel)


async def with_pydantic_ai(task: dict[str, Any], endpoint: Endpoint) -> str:
    url = endpoint.base_url.removesuffix("/v1")
    model = AnthropicModel("policy", provider=AnthropicProvider(base_url=url, api_key=endpoint.api_key))
    result = await PydanticAgent(model, tools=[temperature]).run(task["question"])
    endpoint.reward({"short": 0.01}, result.response.provider_response_id)
    return result.output


async def with_langgraph(task: dict[str, Any], endpoint: Endpoint) -> str:
    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key)
    state = await create_react_agent(model, [tool(temperature)]).ainvoke({"messages": [("user", task["question"])]})
    last = state["messages"][-1]
    endpoint.reward({"short": 0.01}, last.response_metadata["id"])
    return last.content


def with_smolagents(task: dict[str, Any], endpoint: Endpoint) -> str:
    model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "Answer in Python."
    output = agent.run(task["question"])
    endpoint.reward({"short": 0.01})
    return str(output)


def graded(task: dict[str, Any], outcome: ProgramOutcome) -> float:
    return vowels(outcome.output or "")


def trained(folder: Path, model: Any, env: AgentProgramEnv, questions: Sequence[str], **changes: Any) -> Any:
    """Train for a few steps, and return the trainer and the rollouts; check that the weights moved."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rollouts: list[Trajectory] = []
    rows = [{"task_data": {"question": questions[i % len(questions)], "seed": i}} for i in range(8)]
    options: dict[str, Any] = {
        "max_completion_length": 4000,
        "max_turn_tokens": 12,
        "layout": "turn",
        "drift_interval": 1,
    }
    trainer = GRPOEnvTrainer(model, env, settings(folder, **options, **changes), train_dataset=Dataset.from_list(rows))
    generate = trainer.generator.generate
    trainer.generator.generate = lambda *given: [batch := generate(*given), rollouts.extend(batch.trajectories)][0]
    trainer.train()
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    assert max(logged(trainer, "grad_norm")) > 0
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-3
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert all(one.error is None and one.exact for one in rollouts)
    return rollouts


@pytest.mark.parametrize("program", [with_openai_agents_chat, with_pydantic_ai, with_langgraph, with_smolagents])
def test_a_random_policy_is_trained(program: Callable[..., Any], tmp_path: Path) -> None:
    env = AgentProgramEnv(TOKENIZER, {"max_steps_per_episode": 4}, program=program, grade=graded)
    model = tiny_model(TOKENIZER, hidden_size=32, num_heads=2, max_positions=8192)
    rollouts = trained(tmp_path, model, env, ["Is it warm?"], max_steps=2)
    assert len(rollouts) == 16
    assert all({"short"} <= (one.turns[-1].components or {}).keys() for one in rollouts)


class Demonstrator(Agent):
    """Calls the tool with the city of the question, and repeats its result."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        last = messages[-1]
        if last["role"] == "tool":
            return f"It is {last['content']}.", None
        return calls("temperature", city=last["content"].split()[-1].rstrip("?")), None


def test_a_policy_that_has_learned_to_call_the_tool_is_trained(tmp_path: Path) -> None:
    def is_right(task: dict[str, Any], outcome: ProgramOutcome) -> float:
        city = task["question"].split()[-1].rstrip("?")
        return float(str(CITIES[city]) in (outcome.output or ""))

    questions = [f"How warm is it in {city}?" for city in CITIES]
    texts = [*questions, *(calls("temperature", city=city) for city in CITIES)]
    texts += [text for value in CITIES.values() for text in (f"{value} degrees", f"It is {value} degrees.")]
    model, tokenizer = tiny_policy(texts, hidden_size=32, num_heads=2)
    env = AgentProgramEnv(tokenizer, {"max_steps_per_episode": 4}, program=with_openai_agents, grade=is_right)
    tasks = [{"question": question} for question in questions]
    shown = env.rollout(tasks, Demonstrator(), 64)
    assert {one.final_reward for one in shown} == {1.02}
    imitate(model, shown, tokenizer, tiny_imitation_config(60))
    rollouts = trained(tmp_path, model, env, questions, max_steps=3)
    assert any(message["role"] == "tool" for one in rollouts for message in one.messages)
    assert len({one.final_reward for one in rollouts}) > 1


COMMAND = [str(Path(sys.executable).parent / "mini"), "--yolo", "--exit-immediately", "-m", "openai/policy"]


class Shell(AgentProgramEnv):
    """mini-swe-agent in a folder, which is rewarded for what it states."""

    def _grade(self, task_data: dict[str, Any], outcome: ProgramOutcome) -> Any:
        assert outcome.folder is not None
        messages = json.loads((outcome.folder / "out.json").read_text(encoding="utf-8"))["messages"]
        output = [response["choices"][0]["message"]["content"] for one in messages if (response := _response(one))]
        return vowels("".join(map(str, output)))


def _response(message: dict[str, Any]) -> Any:
    return message.get("extra", {}).get("response")


def test_a_random_policy_is_trained_through_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MSWEA_CONFIGURED", "MSWEA_SILENT_STARTUP", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "True")
    monkeypatch.setenv("MSWEA_COST_TRACKING", "ignore_errors")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    command = [*COMMAND, "-t", "{question}", "-o", "out.json"]
    env = Shell(TOKENIZER, {"max_steps_per_episode": 2}, program=command)
    model = tiny_model(TOKENIZER, hidden_size=32, num_heads=2, max_positions=8192)
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2, "max_steps": 2}
    rollouts = trained(tmp_path, model, env, ["List the files."], **options)
    assert all(one.info["num_calls"] == 2 for one in rollouts)
