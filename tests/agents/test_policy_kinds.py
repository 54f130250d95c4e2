"""Every kind of cache gives what ``generate`` gives; ids that the tokenizer lacks are never sampled."""

import logging
import math
from typing import Any

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
from tokenizers import Tokenizer, models
from torch import nn
from transformers import BertConfig, BertLMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from agentsgym import ConfigError, PolicyAgent, SamplingParams, StopReason, logprob_gap
from agentsgym.agents.policy import decoding_strategy
from agentsgym.agents.policy.model import shared_vocabulary_size
from agentsgym.agents.policy.sampling import Sampler
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.testing import chat_tokenizer


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


SIZE = len(TOKENIZER)


def with_padding_rows(kind: str, weight: float, num_rows: int = 13) -> Any:
    """A model of which those rows are all the likelier, the more ``weight`` they are given."""
    model: Any = new_model(kind)
    model.resize_token_embeddings(SIZE + num_rows, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[SIZE:] *= weight
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.4},
    ],
)
def test_padding_rows_change_nothing_of_what_is_sampled(options: dict[str, Any]) -> None:
    padded = with_padding_rows("llama", weight=40.0)
    sessions, others = [Session(n) for n in range(4)], [Session(n) for n in range(4)]
    for _ in range(2):
        actions, expected = (
            play(PolicyAgent(model, TOKENIZER, sampling=SamplingParams(**options)), playing, 8)
            for model, playing in ((padded, sessions), (new_model("llama"), others))
        )
        for action, other in zip(actions, expected, strict=True):
            assert action.token_ids == other.token_ids
            assert list(action.logprobs or ()) == pytest.approx(list(other.logprobs or ()), abs=1e-5)
    likeliest = [logits_of(padded, prompt)[-1].argmax() for session in sessions for prompt, _ in session.turns]
    assert any(token >= SIZE for token in likeliest)


def test_log_probabilities_are_those_of_the_ids_that_the_tokenizer_knows() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    [token], [logprob] = Sampler(SamplingParams(), 3).draw(logits, torch.tensor([0.999]))
    assert token == 2
    assert logprob == pytest.approx(3 - math.log(math.exp(1) + math.exp(2) + math.exp(3)), abs=1e-6)
    [token], [logprob] = Sampler(SamplingParams()).draw(logits, torch.tensor([0.999]))
    assert token == 3
    assert logprob == pytest.approx(9 - math.log(math.exp(1) + math.exp(2) + math.exp(3) + math.exp(9)), abs=1e-6)


def test_no_episode_fails_and_the_gap_to_the_model_is_the_probability_of_the_padding_rows() -> None:
    game = {"max_steps_per_episode": 2, "error_allowance": 2, "objects": ["bee", "kite"]}
    tokenizer = chat_tokenizer("chatml")
    env = TwentyQuestionsEnv(tokenizer, game)
    model = with_padding_rows("qwen3", weight=1.0)
    [trajectory] = env.rollout([{"solution": "bee", "seed": 0}], PolicyAgent(model, tokenizer, max_turn_tokens=6))
    assert trajectory.stop_reason is not StopReason.FAILED
    assert max(trajectory.token_ids) < SIZE
    logits = logits_of(model, list(trajectory.token_ids))[:-1]
    lost = -logits.log_softmax(-1)[:, :SIZE].logsumexp(-1)  # -log(1 - p), of each place
    marked = torch.tensor(trajectory.agent_token_mask[1:]).bool()
    gap = logprob_gap(model, [trajectory])
    assert float(lost[marked].max()) > 1e-3
    assert gap.mean_gap == pytest.approx(float(lost[marked].mean()), abs=1e-5)
    assert gap.kl_k1 == pytest.approx(float(lost[marked].mean()), abs=1e-5)


def test_a_vocabulary_with_holes_reaches_to_its_last_id() -> None:
    raw = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 40}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")
    assert len(tokenizer) == 3
    assert shared_vocabulary_size(new_model("llama"), tokenizer) == 41


def test_a_model_with_fewer_rows_than_the_tokenizer_has_ids_is_refused_and_names_what_to_do() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens(["<one>", "<two>"])
    model = new_model("llama")
    sentence = rf"got {SIZE} rows for {SIZE + 2} ids: call model.resize_token_embeddings\({SIZE + 2}\), or use the mod"
    with pytest.raises(ConfigError, match=sentence):
        PolicyAgent(model, tokenizer)
    model.resize_token_embeddings(SIZE + 2, mean_resizing=False)
    PolicyAgent(model, tokenizer)
