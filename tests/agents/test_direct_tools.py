"""Agents that render messages themselves show tools, and read calls out of the ids that they sample; scripts call."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_families import family, text_of
from tool_game import SumEnv
from transformers import GenerationConfig

from agentsgym.agents.direct import DirectOutputAgent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.types import Action, ToolCall, TurnRequest

ENV = SumEnv()
ARGUMENTS = {"a": 2, "b": 3}
ANSWERS = {
    "qwen3": f'<think>\n2 and 3\n</think>\n\n<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n'
    "</tool_call><|im_end|>",
    "gptoss": f" to=functions.add<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}<|call|>",
    "lfm2_v2": "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|><|im_end|>",
    "qwen3_5_nothink": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>",
}


class Says(torch.nn.Module):
    """Stands for a model: `generate` goes on with fixed ids, and keeps the prompts that it was given."""

    device = torch.device("cpu")
    generation_config = GenerationConfig()

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids = ids
        self.prompts: list[list[int]] = []

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.prompts += input_ids.tolist()
        return torch.cat([input_ids, torch.tensor([self.ids] * len(input_ids))], dim=1)


def request(tools: Any) -> TurnRequest:
    return TurnRequest(session_id="s", messages=[{"role": "user", "content": "2 + 3?"}], token_ids=(), tools=tools)


def agent_that_text(name: str) -> tuple[DirectOutputAgent, Says]:
    tokenizer = family(name)
    ids = tokenizer(ANSWERS[name], add_special_tokens=False)["input_ids"]
    model = Says(ids)
    return DirectOutputAgent(model, tokenizer, eos_token_id=ids[-1]), model


@pytest.mark.parametrize("name", ANSWERS)
def test_a_prompt_that_is_rendered_here_shows_the_tools_and_calls_are_read(name: str) -> None:
    agent, model = agent_that_text(name)
    with_tools, without = agent.act([request(ENV.tool_schemas), request(())])
    assert isinstance(with_tools, Action)
    assert isinstance(without, Action)
    assert with_tools.tool_calls == (ToolCall(name="add", arguments=ARGUMENTS),)
    assert (with_tools.text, with_tools.token_ids) == ("", None)
    assert without.tool_calls == ()
    shown = [text_of(family(name), prompt) for prompt in model.prompts]
    assert ["Add two numbers" in text for text in shown] == [True, False]


def test_a_cut_call_is_none() -> None:
    tokenizer = family("qwen3_5_nothink")
    ids = tokenizer(ANSWERS["qwen3_5_nothink"], add_special_tokens=False)["input_ids"]
    agent = DirectOutputAgent(Says(ids[:-12]), tokenizer, eos_token_id=ids[-1])
    (action,) = agent.act([request(ENV.tool_schemas)])
    assert isinstance(action, Action)
    assert (action.finish_reason, action.tool_calls) == ("length", ())


def test_an_engine_in_this_process_reads_calls_too() -> None:
    tokenizer = family("gptoss")
    ids = tokenizer(ANSWERS["gptoss"], add_special_tokens=False)["input_ids"]

    class Params(SimpleNamespace):
        __struct_fields__ = ("temperature",)

    def generate(prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> list[Any]:
        steps = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        text = tokenizer.decode(ids[:-1], skip_special_tokens=True)
        answer = SimpleNamespace(text=text, token_ids=ids, logprobs=steps, finish_reason="stop")
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    engine = SimpleNamespace(
        generate=generate, get_tokenizer=lambda: tokenizer, get_default_sampling_params=lambda: Params(temperature=1.0)
    )
    (action,) = DirectOutputAgent(engine).act([request(ENV.tool_schemas)])
    assert isinstance(action, Action)
    assert action.tool_calls == (ToolCall(name="add", arguments=ARGUMENTS),)


def test_a_script_may_call_tools() -> None:
    call = ToolCall(name="add", arguments=ARGUMENTS, id="c1")
    (trajectory,) = ENV.rollout([{}], ScriptedAgent([Action(text="Hm.", tool_calls=[call]), "5"]))
    assert (trajectory.success, trajectory.num_turns) == (True, 2)
    assert [list(action.tool_calls) for action in trajectory.info["seen"]] == [[call], []]
    assert [message["content"] for message in trajectory.messages] == ["What is 2 + 3?", "Hm.", "5", "5"]


def test_a_script_may_call_tools_in_text() -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>'
    (trajectory,) = ENV.rollout([{}], ScriptedAgent([text, "5"]))
    assert trajectory.success is True
