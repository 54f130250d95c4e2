"""How the policy agent draws tokens, against transformers' own processors."""

from typing import Any

import pytest
import torch
from policy_sessions import TOKENIZER, Session, greedy, logits_of, model_of, play, sampled
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentsgym.agents.policy import PolicyAgent, Sampling
from agentsgym.seeding import derive_seed


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_log_probabilities_are_those_of_the_sampling_temperature(kind: str) -> None:
    model = model_of(kind)
    agent = PolicyAgent(model, TOKENIZER, sampling=Sampling(temperature=0.7, top_p=0.9))
    sessions = [Session(n) for n in range(3)]
    for _ in range(3):
        for session, action in zip(sessions, play(agent, sessions, 6), strict=True):
            prompt, said = session.turns[-1]
            assert action.logprobs is not None
            recomputed = (logits_of(model, prompt + said) / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
            wanted = recomputed.gather(1, torch.tensor(said)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(list(action.logprobs)), wanted, atol=1e-5, rtol=1e-5)


def sampled_reference(
    model: PreTrainedModel, prompt: list[int], limit: int, seed: int, sampling: Sampling
) -> list[int]:
    """Sample without a cache, with transformers' processors in the order of its ``generate``."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    generator = torch.Generator().manual_seed(derive_seed("policy", seed))
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        scores: Any = processors(torch.tensor([ids]), logits_of(model, ids)[-1:])  # type: ignore[arg-type]
        ids.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
)
def test_sampling_is_that_of_transformers(options: dict[str, Any]) -> None:
    model, sampling = model_of("llama"), Sampling(**options)
    agent = PolicyAgent(model, TOKENIZER, sampling=sampling, seed=11)
    agent.stop_token_ids = frozenset()
    session = Session(0)
    [action] = play(agent, [session], 40)
    assert list(action.token_ids or ()) == sampled_reference(model, session.turns[0][0], 40, 11, sampling)


def test_the_likeliest_alone_is_greedy() -> None:
    model = model_of("llama")
    likeliest, sessions = Session(1), Session(1)
    play(PolicyAgent(model, TOKENIZER, sampling=Sampling(top_k=1)), [likeliest], 12)
    play(greedy(model), [sessions], 12)
    assert likeliest.token_ids == sessions.token_ids


def test_a_repetition_penalty_holds_for_greedy_turns_too() -> None:
    model = model_of("llama")
    agent = PolicyAgent(model, TOKENIZER, sampling=Sampling(temperature=0, repetition_penalty=1e6))
    agent.stop_token_ids = frozenset()
    session = Session(2)
    play(agent, [session], 30)
    plain = greedy(model)
    plain.stop_token_ids = frozenset()
    free = Session(2)
    play(plain, [free], 30)
    assert len(set(free.turns[0][1])) < 30
    positive = [token for token in session.turns[0][1] if token in session.turns[0][0]]
    assert len(set(session.turns[0][1])) == 30
    assert positive == []


def test_seeds_decide_what_is_sampled() -> None:
    model = model_of("llama")
    agent = PolicyAgent(model, TOKENIZER, seed=1)
    first, going_on = sampled(agent), sampled(agent)
    agent.reseed(1)
    assert sampled(agent) == first == sampled(PolicyAgent(model, TOKENIZER, seed=1))
    agent.reseed("train", 3)
    by_phase = sampled(agent)
    agent.reseed("train", 4)
    results = [first, going_on, by_phase, sampled(agent), sampled(PolicyAgent(model, TOKENIZER, seed=2))]
    assert all(one != other for n, one in enumerate(results) for other in results[:n])


def test_the_global_generator_is_neither_read_nor_changed() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = sampled(PolicyAgent(model_of("llama"), TOKENIZER))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert sampled(PolicyAgent(model_of("llama"), TOKENIZER)) == first
