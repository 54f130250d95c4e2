"""The turns of the policy agent: its cache, its budgets, and what it leaves as it was."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_sessions import (
    STOPS,
    TOKENIZER,
    Session,
    counted,
    greedy,
    greedy_reference,
    logits_of,
    logprobs_of,
    model_of,
    new_model,
    play,
    sampled,
)
from transformers import AutoConfig, T5Config, T5ForConditionalGeneration

from agentsgym import AgentError, ConfigError, CopiedPolicyAgent, PolicyAgent, SamplingParams, TurnRequest
from agentsgym.agents.answers import stop_token_ids
from agentsgym.agents.policy.model import num_positions


@settings(max_examples=15)
@given(
    rounds=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), st.integers(1, 7)),
        min_size=1,
        max_size=6,
    )
)
def test_who_else_is_called_and_in_which_order_changes_nothing(rounds: list[tuple[list[int], int]]) -> None:
    model = model_of("llama")
    agent = greedy(model)
    together, alone = ([Session(n) for n in range(5)] for _ in range(2))
    loners = [greedy(model) for _ in range(5)]
    for names, limit in rounds:
        play(agent, [together[n] for n in names], limit)
        for n in names:
            play(loners[n], [alone[n]], limit)
    assert [session.token_ids for session in together] == [session.token_ids for session in alone]


def test_a_prompt_that_fills_the_models_positions_fails_its_own_session_and_an_answer_ends_with_them() -> None:
    model = new_model("llama")
    model.config.max_position_embeddings = 32
    agent = PolicyAgent(model, TOKENIZER, max_turn_tokens=8)
    agent.stop_token_ids = frozenset()
    prompts = [[70] * 10, [70] * 32, [70] * 29, [70] * 2_000]
    requested = [TurnRequest(session_id=str(n), messages=[], token_ids=ids) for n, ids in enumerate(prompts)]
    short, full, cut, long = agent.act(requested)
    assert [len(one.token_ids) for one in (short, cut)] == [8, 3]
    assert cut.finish_reason == "length"
    assert isinstance(full, AgentError)
    assert str(long) == (
        "a prompt of 2000 tokens leaves no room for an answer within the maximum sequence length of LlamaForCausalLM "
        "(32 tokens): set env_config['max_trajectory_tokens'] to at most 32, so that episodes end earlier"
    )
    assert [type(one) for one in agent.act(requested[1:2])] == [AgentError]


@pytest.mark.parametrize("kind", [PolicyAgent, CopiedPolicyAgent])
def test_a_tokenizer_or_a_name_in_the_place_of_the_model_is_refused_with_the_call(kind: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        kind(TOKENIZER, model_of("llama"))
    assert str(raised.value) == (
        "the first argument must be a model, such as AutoModelForCausalLM.from_pretrained returns: call "
        f"{kind.__name__}(model, tokenizer); got a {type(TOKENIZER).__name__}"
    )
    with pytest.raises(ConfigError, match=r"got 'org/model'$"):
        kind("org/model", TOKENIZER)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("llama", {"max_position_embeddings": 512}, 512),
        ("llama", {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
        (
            "qwen2",
            {
                "max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
            },
            1024,
        ),
        (
            "llama",
            {
                "max_position_embeddings": 1024,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 512,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            1024,
        ),
        ("llama", {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 512),
        ("gemma3_text", {"max_position_embeddings": 512}, 512),
        ("gpt2", {"n_positions": 128}, 128),
        ("falcon", {"alibi": True}, None),
        ("mamba", {}, None),
        ("bloom", {}, None),
    ],
)
def test_the_positions_of_a_model_are_read_from_its_configuration(
    kind: str, options: Any, expected: int | None
) -> None:
    config = AutoConfig.for_model(kind, **options)
    assert num_positions(SimpleNamespace(config=config)) == expected


def columns_run(sessions: list[Session], agent: PolicyAgent, passes: list[tuple[int, int]], limit: int = 6) -> int:
    """Play a turn and return how many columns the widest of its forward passes ran."""
    passes.clear()
    play(agent, sessions, limit)
    assert [width for _, width in passes].count(1) >= len(passes) - 1
    return max(width for _, width in passes)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_history_is_not_run_again(kind: str) -> None:
    model = model_of(kind)
    sessions = [Session(n) for n in range(3)]
    with counted(model) as passes:
        agent = greedy(model)
        widths = [columns_run(sessions, agent, passes) for _ in range(8)]
    assert min(len(session.token_ids) for session in sessions) > 40
    assert max(widths) <= 10  # the longest observation, and the last token answered, which was not run yet


def test_sessions_that_end_or_pause_do_not_make_anyone_start_again() -> None:
    model = model_of("llama")
    sessions = [Session(n) for n in range(4)]
    with counted(model) as passes:
        agent = greedy(model)
        for live in ([0, 1, 2, 3], [0, 1, 2, 3], [2, 0], [1, 3], [3, 2, 1, 0], [1], [0, 1]):
            assert columns_run([sessions[n] for n in live], agent, passes) <= 10
    for session in sessions:
        assert all(output == greedy_reference(model, prompt, 6) for prompt, output in session.turns)


def test_a_conversation_that_begins_late_is_run_apart_from_short_ones() -> None:
    model = model_of("llama")
    agent, old, late = greedy(model), [Session(n) for n in range(3)], Session(9)
    late.token_ids = [60 + n % 300 for n in range(150)]
    play(agent, old, 4)
    with counted(model) as passes:
        play(agent, [old[0], late, old[1], old[2]], 4)
    assert [rows for rows, width in passes if width > 1] == [3, 1]
    for session in (*old, late):
        assert all(output == greedy_reference(model, prompt, 4) for prompt, output in session.turns)


def test_finished_rows_are_not_run_on() -> None:
    model = model_of("llama")
    agent = greedy(model)
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(8)]
    for _ in range(2):
        with counted(model) as passes:
            requests = [session.request(16 if n == 3 else 2) for n, session in enumerate(sessions)]
            for session, action in zip(sessions, agent.act(requests), strict=True):
                session.record(action)
        assert [rows for rows, _ in passes] == [8, 8, *[1] * 14]
    for session in sessions:
        for prompt, output in session.turns:
            assert output == logits_of(model, prompt + output)[len(prompt) - 1 : -1].argmax(-1).tolist()


@settings(max_examples=25)
@given(
    turns=st.lists(
        st.lists(
            st.tuples(st.floats(0, 1), st.lists(st.integers(60, 70), min_size=1, max_size=6)), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["llama", "mistral", "qwen3_next"]),
)
def test_histories_may_be_rewritten(turns: list[list[tuple[float, list[int]]]], kind: str) -> None:
    model = model_of(kind)
    agent, sessions = greedy(model), [Session(n) for n in range(3)]
    for rewrites in turns:
        for session, (fraction, ids) in zip(sessions, rewrites, strict=True):
            session.token_ids[round(fraction * len(session.token_ids)) :] = ids
        for action, session in zip(play(agent, sessions, 4), sessions, strict=True):
            prompt, output = session.turns[-1]
            logits = logits_of(model, prompt + output)[len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(-1), atol=1e-5, rtol=0)  # rounding may break ties
            wanted = logprobs_of(model, prompt, output)
            torch.testing.assert_close(torch.tensor(list(action.logprobs or ())), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_next"])
def test_equal_prompts_at_the_start_are_run_once(kind: str) -> None:
    model, sessions = model_of(kind), [Session(number) for number in (0, 0, 1, 0, 1)]
    for number, session in enumerate(sessions):
        session.name, session.token_ids = f"session {number}", [60 + token % 17 for token in range(40)]
    agent = greedy(model)
    with counted(model) as passes:
        play(agent, sessions, 3)
    assert sum(rows for rows, columns in passes if columns > 1) == 2
    sessions[3].token_ids += [70, 71]
    play(agent, sessions, 3)
    for session in sessions:
        for prompt, output in session.turns:
            assert output == greedy_reference(model, prompt, 3)


def test_the_head_gets_contiguous_states() -> None:
    model = new_model("llama")
    given: list[bool] = []
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: given.append(inputs[0].is_contiguous()))
    play(greedy(model), [Session(n) for n in range(3)], 2)
    assert given
    assert all(given), "torch would copy a frozen head for every row"


def test_only_what_was_rewritten_is_run_again() -> None:
    model = model_of("llama")
    agent, session = greedy(model), Session(0)
    for _ in range(6):
        play(agent, [session], 6)
    session.token_ids[-5:] = [60, 61, 62]
    with counted(model) as passes:
        action = agent.act(
            [TurnRequest(session_id="0", messages=[], token_ids=session.token_ids, agent_state=session.state)]
        )
    assert passes[0] == (1, 3)
    assert list(action[0].token_ids or ()) == greedy_reference(model, session.token_ids, 256)


def test_a_prompt_may_end_where_the_cache_does_or_before() -> None:
    model = model_of("llama")
    agent = greedy(model)
    prompt = [70, 80, 90, 100, 110]
    first = agent.act([TurnRequest(session_id="0", messages=[], token_ids=prompt, max_new_tokens=4)])[0]
    for length in (5, 2):
        request = TurnRequest(
            session_id="0", messages=[], token_ids=prompt[:length], agent_state=first.agent_state, max_new_tokens=4
        )
        assert list(agent.act([request])[0].token_ids or ()) == greedy_reference(model, prompt[:length], 4)


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_weights_that_changed_make_everything_be_run_again(kind: str) -> None:
    model = new_model(kind)
    agent, fresh = (
        PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0), max_turn_tokens=6) for _ in range(2)
    )
    sessions = [Session(n) for n in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        play(agent, sessions)
        model(torch.tensor([sessions[0].token_ids])).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    actions = play(agent, sessions)
    prompts = [session.turns[-1][0] for session in sessions]
    wanted = fresh.act([TurnRequest(session_id="", messages=[], token_ids=prompt) for prompt in prompts])
    for got, new in zip(actions, wanted, strict=True):
        assert got.token_ids == new.token_ids
        assert got.logprobs == pytest.approx(new.logprobs, abs=1e-5)


def test_weights_that_are_exchanged_are_seen() -> None:
    model = new_model("llama")
    agent, session = greedy(model), Session(0)
    for weights in [model.lm_head.weight, model.model.embed_tokens.weight]:
        play(agent, [session], 6)
        weights.data = -weights.data
        play(agent, [session], 6)
        prompt, output = session.turns[-1]
        assert output == greedy_reference(model, prompt, 6)


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
        actions = agent.act([session.request(limit) for session, limit in zip(sessions, (0, 4, 2), strict=True)])
        for session, action in zip(sessions, actions, strict=True):
            session.record(action)
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
    requests = [session.request(5) for session in sessions]
    with pytest.raises(RuntimeError, match="out of memory"):
        agent.act(requests)
    assert model.training
    for half in (slice(0, 1), slice(1, 3)):  # as the driver calls again
        for session, action in zip(sessions[half], agent.act(requests[half]), strict=True):
            session.record(action)
    play(agent, sessions, 5)
    model.eval()
    for session in sessions:
        for prompt, spoken in session.turns:
            output: Any = logits_of(model, prompt + spoken)[len(prompt) - 1 : -1].argmax(-1)
            assert spoken == output.tolist()


def test_finish_frees_the_cache() -> None:
    agent, sessions = greedy(new_model("llama")), [Session(n) for n in range(3)]
    play(agent, sessions, 5)
    caches = [weakref.ref(session.state.prefix.rows) for session in sessions]  # type: ignore[attr-defined]
    assert all(cache() is not None for cache in caches)
    agent.finish()
    assert all(cache() is None for cache in caches)
    play(agent, sessions, 5)


def test_a_conversation_that_is_forgotten_frees_its_cache() -> None:
    agent, session = greedy(new_model("llama")), Session(0)
    play(agent, [session], 5)
    held = weakref.ref(session.state.prefix)  # type: ignore[attr-defined]
    session.state = None
    assert held() is None


def test_what_another_agent_holds_is_not_used() -> None:
    one, other = new_model("llama"), new_model("qwen3")
    session = Session(0)
    play(greedy(one), [session], 5)
    play(greedy(other), [session], 5)
    assert session.output[-1] == greedy_reference(other, session.turns[-1][0], 5)


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
    with pytest.raises(ConfigError, match="requires a decoder-only model, got T5ForConditionalGeneration"):
        PolicyAgent(encoder_decoder, TOKENIZER)
    with pytest.raises(ConfigError, match="requires an environment with a tokenizer"):
        greedy(model_of("llama")).act([TurnRequest(session_id="a", messages=[], token_ids=[])])
