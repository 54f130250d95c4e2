"""The turns of the policy agent: its cache, its budgets, and what it leaves as it was."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_sessions import (
    MODELS,
    STOPS,
    TOKENIZER,
    Session,
    counted,
    greedy,
    greedy_reference,
    logits_of,
    model_of,
    new_model,
    play,
    sampled,
)
from transformers import T5Config, T5ForConditionalGeneration

from agentsgym.agents.policy import PolicyAgent, Sampling
from agentsgym.agents.stopping import stop_token_ids
from agentsgym.errors import ConfigError
from agentsgym.types import TurnRequest


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_turns_are_those_of_generate_on_the_whole_prompt(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(kind)
    with caplog.at_level(logging.WARNING, logger="agentsgym"):
        agent = greedy(model)
    assert [record.getMessage() for record in caplog.records] == (
        ["the cache of MistralForCausalLM cannot be kept across turns: prefilling each turn"]
        if kind == "mistral"
        else []
    )
    sessions = [Session(n) for n in range(4)]
    for _ in range(4):
        play(agent, sessions, 8)
    turns = [turn for session in sessions for turn in session.turns]
    assert len({len(said) for _, said in turns}) > 2
    for prompt, said in turns:
        assert said == greedy_reference(model, prompt, 8)


@settings(max_examples=15)
@given(
    rounds=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), st.integers(1, 7)),
        min_size=1,
        max_size=6,
    )
)
def test_who_else_is_asked_and_in_which_order_changes_nothing(rounds: list[tuple[list[int], int]]) -> None:
    model = model_of("llama")
    agent = greedy(model)
    together, alone = ([Session(n) for n in range(5)] for _ in range(2))
    loners = [greedy(model) for _ in range(5)]
    for names, limit in rounds:
        play(agent, [together[n] for n in names], limit)
        for n in names:
            play(loners[n], [alone[n]], limit)
    assert [session.token_ids for session in together] == [session.token_ids for session in alone]


def test_only_new_tokens_are_run() -> None:
    model = model_of("llama")
    sessions = [Session(n) for n in range(3)]
    with counted(model) as passes:
        agent = greedy(model)
        for _ in range(5):
            play(agent, sessions, 6)
    # The last token that a session said has not been run yet.
    assert sum(tokens for tokens, _ in passes) == sum(len(session.token_ids) - 1 for session in sessions)


def test_a_session_that_ends_does_not_make_the_others_start_again() -> None:
    model = model_of("llama")
    sessions = [Session(n) for n in range(3)]
    with counted(model) as passes:
        agent = greedy(model)
        for num_live in (3, 3, 2, 2, 1):
            play(agent, sessions[:num_live], 6)
    assert sum(tokens for tokens, _ in passes) == sum(len(session.token_ids) - 1 for session in sessions)
    assert all(said == greedy_reference(model, prompt, 6) for session in sessions for prompt, said in session.turns)


def test_holes_are_closed() -> None:
    model = model_of("llama")
    agent = greedy(model)
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(4)]
    with counted(model) as passes:
        for turn in range(12):
            requests = [session.ask(20 if n == turn % 4 else 1) for n, session in enumerate(sessions)]
            for session, action in zip(sessions, agent.act(requests), strict=True):
                session.hear(action)
    longest = max(len(session.token_ids) for session in sessions)
    assert max(width for _, width in passes) <= 2 * longest + 30  # what one turn adds
    for session in sessions:
        for prompt, said in session.turns:
            output: Any = logits_of(model, prompt + said)[len(prompt) - 1 : -1].argmax(-1)
            assert said == output.tolist()


def test_budgets_and_stop_tokens_end_a_turn() -> None:
    model = model_of("llama")
    agent = greedy(model, max_turn_tokens=5)
    sessions = [Session(n) for n in range(8)]
    reasons: set[str] = set()
    for limit in (None, 1, 3):
        for action in play(agent, sessions, limit):
            ids = list(action.token_ids or ())
            reasons.add(action.finish_reason)
            assert 1 <= len(ids) <= (limit or 5)
            assert len(action.logprobs or ()) == len(ids)
            assert not any(token in agent.stop_token_ids for token in ids[:-1])
            stopped = ids[-1] in agent.stop_token_ids
            assert action.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(ids) == (limit or 5)
            assert action.text == TOKENIZER.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
    assert reasons == {"stop", "length"}


def test_budgets_differ_from_row_to_row_and_may_be_nothing() -> None:
    model = model_of("llama")
    agent = greedy(model)
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(3)]
    for _ in range(2):
        actions = agent.act([session.ask(limit) for session, limit in zip(sessions, (0, 4, 2), strict=True)])
        for session, action in zip(sessions, actions, strict=True):
            session.hear(action)
        assert [len(action.token_ids or ()) for action in actions] == [0, 4, 2]
    assert agent.act([]) == []


def test_every_declared_end_stops_a_turn() -> None:
    model = new_model("llama")
    end = TOKENIZER.eos_token_id
    assert stop_token_ids(model, TOKENIZER) == {*STOPS, end}
    model.generation_config.eos_token_id = 7
    assert stop_token_ids(model, TOKENIZER) == {7, end}
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model, TOKENIZER) == {end}


def test_training_mode_and_gradient_checkpointing_change_nothing_and_stay() -> None:
    model = new_model("llama")
    expected = sampled(greedy(model))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    model.train()
    # Renamed during transformers 5.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    assert sampled(greedy(model)) == expected
    assert [module.training for module in model.modules()] == modes
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("broken_call", [1, 2, 4, 5])
def test_a_forward_pass_that_fails_leaves_the_agent_usable(broken_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")
    model.train()
    agent = greedy(model)
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(3)]
    play(agent, sessions, 3)
    calls, forward = 0, model.model.forward

    def fragile(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        output = forward(*args, **kwargs)
        if calls == broken_call:
            raise RuntimeError("out of memory")
        return output

    monkeypatch.setattr(model.model, "forward", fragile)
    requests = [session.ask(5) for session in sessions]
    with pytest.raises(RuntimeError, match="out of memory"):
        agent.act(requests)
    assert model.training
    for half in (slice(0, 1), slice(1, 3)):  # as the driver asks again
        for session, action in zip(sessions[half], agent.act(requests[half]), strict=True):
            session.hear(action)
    play(agent, sessions, 5)
    model.eval()
    for session in sessions:
        for prompt, said in session.turns:
            output: Any = logits_of(model, prompt + said)[len(prompt) - 1 : -1].argmax(-1)
            assert said == output.tolist()


def test_finish_frees_the_cache_and_follows_new_weights() -> None:
    model = new_model("llama")
    agent = greedy(model)
    session = Session(0)
    play(agent, [session], 5)
    assert agent._cache.rows
    assert agent._cache.layers.get_seq_length() > 0
    agent.finish()
    assert agent._cache.rows == []
    assert agent._cache.layers.get_seq_length() == 0
    assert agent._cache.mask.shape == (0, 0)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    play(agent, [session], 5)
    prompt, said = session.turns[-1]
    assert said == greedy_reference(model, prompt, 5)


def test_actions_are_not_changed_by_later_turns() -> None:
    agent = greedy(model_of("llama"))
    session = Session(0)
    [first] = play(agent, [session], 5)
    ids, logprobs = list(first.token_ids or ()), list(first.logprobs or ())
    play(agent, [session], 5)
    assert (first.token_ids, first.logprobs) == (ids, logprobs)


def test_the_context_is_entered_and_left() -> None:
    events: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        events.append("in")
        yield
        events.append("out")

    play(greedy(model_of("llama"), context=context), [Session(0)], 3)
    assert events == ["in", "out"]


def test_what_cannot_be_sampled_is_refused() -> None:
    encoder_decoder = T5ForConditionalGeneration(
        T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(ConfigError, match="needs a decoder-only model, got T5ForConditionalGeneration"):
        PolicyAgent(encoder_decoder, TOKENIZER)
    with pytest.raises(ConfigError, match="temperature must be a non-negative number, got -1"):
        Sampling(temperature=-1)
    with pytest.raises(ConfigError, match="needs an environment with a tokenizer"):
        greedy(model_of("llama")).act([TurnRequest(session_id="a", messages=[], token_ids=[])])
