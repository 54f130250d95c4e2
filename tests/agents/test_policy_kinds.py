"""Every kind of cache: the tokens are those of ``generate``, the log-probabilities those of one pass over the row."""

import logging

import pytest
import torch
from policy_sessions import (
    KINDS,
    TOKENIZER,
    Session,
    greedy,
    greedy_reference,
    logits_of,
    logprobs_of,
    model_of,
    new_model,
    play,
)
from torch import nn
from transformers import BertConfig, BertLMHeadModel, PreTrainedModel

from agentsgym.agents.policy import decoding_strategy
from agentsgym.agents.policy.agent import PolicyAgent, SamplingParams
from agentsgym.errors import ConfigError


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("agentsgym")]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_turns_are_those_of_generate_on_the_whole_prompt(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, (_, _, way) = new_model(kind), KINDS[kind]
    sessions = [Session(n) for n in range(4)]
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        agent = greedy(model)
        play(agent, sessions, 7)
        play(agent, [sessions[3], sessions[1]], 7)
        for session in (sessions[0], sessions[3]):  # a history that is written anew from somewhere in its middle
            session.token_ids[len(session.token_ids) // 2 :] = [77, 88]
        actions = play(agent, sessions, 7)
    assert [f" is {way}" in output for output in complaints(caplog)] == ([] if way == "kept" else [True])
    assert {len(output) for session in sessions for output in session.output} > {7}
    for session in sessions:
        for prompt, output in session.turns[:-1]:
            assert output == logits_of(model, prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()
        prompt, output = session.turns[-1]
        assert output == greedy_reference(model, prompt, 7)
    for session, action in zip(sessions, actions, strict=True):
        wanted = logprobs_of(model, *session.turns[-1])
        torch.testing.assert_close(torch.tensor(list(action.logprobs or ())), wanted, atol=5e-5, rtol=1e-5)


def test_a_model_that_sees_what_is_to_come_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertLMHeadModel(BertConfig(vocab_size=len(TOKENIZER), initializer_range=0.3, is_decoder=False, **sizes))
    with pytest.raises(ConfigError, match="BertLMHeadModel cannot be sampled: no way of decoding token by token"):
        play(PolicyAgent(model, TOKENIZER), [Session(0)], 3)


def test_how_a_model_is_run_is_found_once_and_does_not_keep_it_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")
    play(greedy(model), [Session(0)], 2)
    before = len(decoding_strategy._chosen)
    with monkeypatch.context() as patch:
        patch.setattr(decoding_strategy, "_choose", lambda forward: pytest.fail("looked again"))
        play(greedy(model), [Session(0)], 2)
    del model
    assert len(decoding_strategy._chosen) == before - 1


class Adapter(nn.Module):
    """Wraps a model as PEFT does: a forward that takes anything, and the attributes of the model within."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base_model = model
        self.shift = nn.Parameter(torch.zeros(()))

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model

    def forward(self, *args: object, **kwargs: object) -> object:
        output = self.base_model(*args, **kwargs)
        output.logits = output.logits + self.shift * torch.arange(output.logits.shape[-1])
        return output


@pytest.mark.parametrize("kind", ["llama", "bloom", "mamba"])  # with and without position ids, and another cache name
def test_adapters_are_sampled_like_the_model_within(kind: str) -> None:
    model = model_of(kind)
    wrapped, plain = [Session(n) for n in range(3)], [Session(n) for n in range(3)]
    adapter = Adapter(model)
    agents = PolicyAgent(adapter, TOKENIZER, seed=4), PolicyAgent(model, TOKENIZER, seed=4)  # type: ignore[arg-type]
    for agent, sessions in zip(agents, (wrapped, plain), strict=True):
        play(agent, sessions, 5)
        play(agent, sessions, 5)
    assert [session.output for session in wrapped] == [session.output for session in plain]
    adapter.shift.data += 100.0
    [action] = play(agents[0], wrapped[:1], 1)
    assert list(action.token_ids or ()) == [len(TOKENIZER) - 1]


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_half_precision_keeps_the_cache(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model(kind).to(torch.bfloat16)  # type: ignore[arg-type]
    sessions = [Session(n) for n in range(4)]
    agent = PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=1.0))
    for _ in range(3):
        play(agent, sessions, 6)
    assert complaints(caplog) == []


def test_autocast_keeps_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    agent = greedy(new_model("qwen3"), context=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    sessions = [Session(n) for n in range(3)]
    for _ in range(2):
        play(agent, sessions, 6)
    assert complaints(caplog) == []
