"""A function or a transformers model as an agent: batches equal single answers, with tools and without."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_families import family, text_of
from tokenizers import Tokenizer, models, pre_tokenizers
from tool_game import SumEnv
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentsgym.agents.answers import stop_token_ids
from agentsgym.agents.direct import DirectOutputAgent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.errors import AgentError, ConfigError
from agentsgym.types import Action, Message, ToolCall, TurnRequest

WORDS = [f"w{number}" for number in range(24)]
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
END = 1
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", additional_special_tokens=["<user>", "<assistant>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(8)  # of its four answers some stop, one runs on, and two sample the pad token
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=END,
        initializer_range=0.4,  # spreads the logits: greedy answers then differ between prompts
    )
    return LlamaForCausalLM(config).double()  # double: padding changes the order of sums, and must change no argmax


def request(token_ids: list[int], text: str = "w1", **fields: Any) -> TurnRequest:
    messages: list[Message] = [{"role": "user", "content": text}]
    return TurnRequest(session_id="a", messages=messages, token_ids=token_ids, **fields)


def actions_of(agent: DirectOutputAgent, *requests: TurnRequest) -> list[Action]:
    actions = agent.act(requests)
    assert all(isinstance(action, Action) for action in actions)
    return list(actions)  # type: ignore[arg-type]


def greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """The textbook loop: one full forward pass a token, no cache, no padding."""
    ids = list(prompt)
    model.eval()
    with torch.no_grad():
        while len(ids) < len(prompt) + num_tokens and (len(ids) == len(prompt) or ids[-1] != END):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [[2, 5, 1, 3], [2, 9, 10, 11, 12, 1, 3], [2, 20, 1, 3, 6, 1, 2, 7, 1, 3], [2, 27, 14, 1, 3]]


def test_a_function_answers_every_session() -> None:
    agent = DirectOutputAgent(lambda messages: f"{len(messages)} {messages[-1]['content']}")
    first, second = actions_of(agent, request([], "hello"), request([], "there", agent_state="kept"))
    assert (first.text, second.text) == ("1 hello", "1 there")
    assert (first.token_ids, second.agent_state) == (None, "kept")


def test_a_function_may_keep_or_change_the_messages_it_was_given() -> None:
    kept: list[list[Message]] = []
    requested = request([])

    def source(messages: list[Message]) -> str:
        kept.append(messages)
        messages.clear()
        return "w1"

    actions_of(DirectOutputAgent(source), requested)
    assert len(requested.messages) == 1


@pytest.mark.parametrize("answer", [None, 3, b"bytes", ("text", None)])
def test_an_answer_that_is_no_text_is_a_fault_of_that_session(answer: Any) -> None:
    agent = DirectOutputAgent(lambda messages: answer if messages[-1]["content"] == "bad" else "fine")
    good, bad = agent.act([request([], "good"), request([], "bad")])
    assert isinstance(good, Action)
    assert isinstance(bad, AgentError)
    assert f"must return a str, got {answer!r}" in str(bad)


def test_a_function_that_raises_is_a_fault_with_its_traceback() -> None:
    def source(messages: list[Message]) -> str:
        raise RuntimeError("the service is down")

    (fault,) = DirectOutputAgent(source).act([request([])])
    assert isinstance(fault, AgentError)
    assert "RuntimeError: the service is down" in str(fault)


def test_a_greedy_batch_equals_the_textbook_loop_row_by_row() -> None:
    model = make_model()
    agent = DirectOutputAgent(model, make_tokenizer(), max_new_tokens=12, do_sample=False)
    together = actions_of(agent, *map(request, PROMPTS))
    assert [action.token_ids for action in together] == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert [actions_of(agent, request(prompt))[0] for prompt in PROMPTS] == together
    assert len({tuple(action.token_ids or ()) for action in together}) > 1
    assert {action.finish_reason for action in together} == {"stop", "length"}


def test_an_answer_ends_with_its_end_token_and_shows_none_of_it() -> None:
    tokenizer = make_tokenizer()
    agent = DirectOutputAgent(make_model(), tokenizer, max_new_tokens=12, do_sample=False)
    for action in actions_of(agent, *map(request, PROMPTS)):
        ids = list(action.token_ids or ())
        assert (ids[-1] == END) == (action.finish_reason == "stop")
        assert END not in ids[:-1]
        assert action.text == " ".join(WORDS[token - len(SPECIAL)] for token in ids if token >= len(SPECIAL))


def test_each_request_keeps_to_its_own_budget() -> None:
    model = make_model()
    agent = DirectOutputAgent(model, make_tokenizer(), max_new_tokens=9, do_sample=False)
    budgets = [1, 3, 50, None]
    actions = actions_of(
        agent, *[request(prompt, max_new_tokens=budget) for prompt, budget in zip(PROMPTS, budgets, strict=True)]
    )
    expected = [greedy(model, prompt, min(budget or 9, 9)) for prompt, budget in zip(PROMPTS, budgets, strict=True)]
    assert [action.token_ids for action in actions] == expected


def test_messages_are_rendered_where_no_exact_prompt_is_known() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    agent = DirectOutputAgent(model, tokenizer, max_new_tokens=6, do_sample=False)
    rendered = [2, len(SPECIAL) + 7, END, 3]
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "w7"}], add_generation_prompt=True, return_dict=False
    ) == rendered  # fmt: skip
    exact, from_text = actions_of(agent, request(rendered), request([], "w7"))
    assert exact.token_ids == greedy(model, rendered, 6)
    assert from_text.text == exact.text
    assert from_text.token_ids is None
    assert agent.get_action([{"role": "user", "content": "w7"}], "kept") == (exact.text, "kept")


def test_without_a_chat_template_the_contents_are_joined() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    tokenizer.chat_template = None
    agent = DirectOutputAgent(model, tokenizer, max_new_tokens=6, do_sample=False)
    exact, from_text = actions_of(agent, request([4 + 3, 4 + 5]), request([], "w3 w5"))
    assert from_text.text == exact.text


def test_the_exact_prompt_wins_over_the_messages() -> None:
    model = make_model()
    agent = DirectOutputAgent(model, make_tokenizer(), max_new_tokens=6, do_sample=False)
    (action,) = actions_of(agent, request(PROMPTS[1], "w22 w23"))
    assert action.token_ids == greedy(model, PROMPTS[1], 6)


def test_a_model_without_pad_token_pads_with_its_end_token() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    tokenizer.pad_token = None
    agent = DirectOutputAgent(model, tokenizer, max_new_tokens=12, do_sample=False)
    expected = [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert [action.token_ids for action in actions_of(agent, *map(request, PROMPTS))] == expected


def test_the_tokenizers_end_token_counts_beside_the_models() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    free_run = greedy(model, PROMPTS[0], 12)
    turn_end = free_run[2]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(turn_end)
    (action,) = actions_of(DirectOutputAgent(model, tokenizer, max_new_tokens=12, do_sample=False), request(PROMPTS[0]))
    assert action.token_ids == free_run[: free_run.index(turn_end) + 1]
    assert action.finish_reason == "stop"


def test_the_templates_end_of_turn_counts_where_model_and_tokenizer_declare_others() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    prompt, answer = next((p, a) for p in PROMPTS if (a := greedy(model, p, 12))[-1] == END)
    declared, words_end = [token for token in range(len(SPECIAL), len(tokenizer)) if token not in answer][:2]
    model.generation_config.eos_token_id = declared
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(words_end)
    agent = DirectOutputAgent(model, tokenizer, max_new_tokens=12, do_sample=False)
    (action,) = actions_of(agent, request(prompt))
    assert action.token_ids == answer
    assert action.finish_reason == "stop"
    assert stop_token_ids(model, tokenizer) == {declared, words_end, END}
    assert PolicyAgent(model, tokenizer).stop_token_ids == stop_token_ids(model, tokenizer)


def test_a_template_without_exact_tokens_is_rendered_all_the_same() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    tokenizer.chat_template = "<user> {{ messages[-1].content | lower }} <end> <assistant>"
    agent = DirectOutputAgent(model, tokenizer, max_new_tokens=12, do_sample=False)
    (action,) = actions_of(agent, request([], "W7"))
    ids = greedy(model, [2, len(SPECIAL) + 7, END, 3], 12)
    assert action.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_functions_as_agents_need_no_torch() -> None:
    code = "import sys, agentsgym.agents.direct; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_modes_come_back_module_by_module_and_no_gradient_is_kept() -> None:
    model = make_model()
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    modes_inside: set[bool] = set()
    model.lm_head.register_forward_hook(lambda module, *_: modes_inside.add(module.training or torch.is_grad_enabled()))
    actions_of(DirectOutputAgent(model, make_tokenizer(), max_new_tokens=3), request(PROMPTS[0]))
    assert [module.training for module in model.modules()] == before
    assert modes_inside == {False}


def test_modes_come_back_when_generation_breaks() -> None:
    model = make_model()
    model.train()
    agent = DirectOutputAgent(model, make_tokenizer(), max_new_tokens=3)
    with pytest.raises(IndexError):
        agent.act([request([10_000])])
    assert all(module.training for module in model.modules())


def test_no_request_is_nothing_generated() -> None:
    assert list(DirectOutputAgent(make_model(), make_tokenizer()).act([])) == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((make_model(),), {}, "a model requires its tokenizer"),
        ((lambda messages: "", make_tokenizer()), {}, "a tokenizer is only valid with a model"),
        (("gpt",), {}, "a source must be a function of the messages, a model or a vLLM engine, got 'gpt'"),
        ((lambda messages: "",), {"do_sample": True}, "generation options are only valid with a model"),
        ((make_model(), make_tokenizer()), {"num_return_sequences": 2}, r"not accept .* \['num_return_sequences'\]"),
        ((make_model(), make_tokenizer()), {"stop_strings": ["."]}, r"not accept .* \['stop_strings'\]"),
        ((make_model(), make_tokenizer()), {"max_new_tokens": 0}, "max_new_tokens must be an int of at least 1, got 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DirectOutputAgent(*arguments, **options)


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


def request_with_tools(tools: Any) -> TurnRequest:
    return TurnRequest(session_id="s", messages=[{"role": "user", "content": "2 + 3?"}], token_ids=(), tools=tools)


def agent_that_text(name: str) -> tuple[DirectOutputAgent, Says]:
    tokenizer = family(name)
    ids = tokenizer(ANSWERS[name], add_special_tokens=False)["input_ids"]
    model = Says(ids)
    return DirectOutputAgent(model, tokenizer, eos_token_id=ids[-1]), model


@pytest.mark.parametrize("name", ANSWERS)
def test_a_prompt_that_is_rendered_here_shows_the_tools_and_calls_are_read(name: str) -> None:
    agent, model = agent_that_text(name)
    with_tools, without = agent.act([request_with_tools(ENV.tool_schemas), request_with_tools(())])
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
    (action,) = agent.act([request_with_tools(ENV.tool_schemas)])
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
    (action,) = DirectOutputAgent(engine).act([request_with_tools(ENV.tool_schemas)])
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
