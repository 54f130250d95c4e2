"""How the policy agent draws tokens, against transformers' own processors."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_sessions import TOKENIZER, Session, greedy, logits_of, logprobs_of, model_of, new_model, play, sampled
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentsgym import ConfigError, PolicyAgent, SamplingParams, TurnRequest
from agentsgym.agents.policy.sampling import StopText, inverse_transform_sample, penalized, seen_tokens
from agentsgym.seeding import derive_seed


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_log_probabilities_are_those_of_the_sampling_temperature(kind: str) -> None:
    model = model_of(kind)
    agent = PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0.7, top_p=0.9))
    sessions = [Session(n) for n in range(3)]
    for _ in range(3):
        for session, action in zip(sessions, play(agent, sessions, 6), strict=True):
            wanted = logprobs_of(model, *session.turns[-1], temperature=0.7)
            torch.testing.assert_close(torch.tensor(list(action.logprobs or ())), wanted, atol=1e-5, rtol=1e-5)


def first_beyond(probabilities: list[float], fraction: float) -> int:
    """Inverse transform sampling, written down."""
    total, reached = sum(probabilities), 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if reached > fraction * total:
            return token
    raise AssertionError("beyond the total")


def sampled_reference(
    model: PreTrainedModel, prompt: list[int], limit: int, draws: random.Random, sampling: SamplingParams
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
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        scores: Any = processors(torch.tensor([ids]), logits_of(model, ids)[-1:])  # type: ignore[arg-type]
        ids.append(first_beyond(scores.softmax(-1)[0].tolist(), draws.random()))
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
    model, sampling = model_of("llama"), SamplingParams(**options)
    agent = PolicyAgent(model, TOKENIZER, sampling=sampling, seed=11)
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(2)]
    draws = [random.Random(derive_seed("policy", 11, number)) for number in range(2)]
    for _ in range(2):
        play(agent, sessions, 16)
        for session, own_draws in zip(sessions, draws, strict=True):
            prompt, output = session.turns[-1]
            assert output == sampled_reference(model, prompt, 16, own_draws, sampling)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0, 3.0]), min_size=1, max_size=8).filter(any),
    fraction=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
def test_the_cumulative_probability_is_inverted(weights: list[float], fraction: float) -> None:
    # In double precision, as the sums are: 1e-30 is lost in a sum of ordinary numbers there too.
    [[token]] = inverse_transform_sample(
        torch.tensor([weights], dtype=torch.float64), torch.tensor([fraction], dtype=torch.float64)
    ).tolist()
    assert token == first_beyond(weights, fraction)
    assert weights[token] > 0


def test_unlikely_tokens_of_a_large_vocabulary_are_drawn_too() -> None:
    size, unlikely = 150_000, 1e-9  # less than the spacing of single-precision numbers at the sum
    probabilities = torch.full((1, size), unlikely)
    probabilities[0, 0] = 1.0
    total = 1 + (size - 1) * unlikely
    for token in (1, 2, 1000, 1001, 99_999, size - 1):
        drawn = inverse_transform_sample(
            probabilities, torch.tensor([(1 + (token - 0.5) * unlikely) / total], dtype=torch.float64)
        )
        assert drawn.item() == pytest.approx(token, abs=1)
    assert inverse_transform_sample(probabilities, torch.tensor([0.999])).item() == 0


def test_frequencies_are_the_probabilities() -> None:
    model = model_of("llama")
    agent = PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0.3, top_k=6), seed=1)
    prompt, count = [70, 80, 90], 3000
    requests = [TurnRequest(session_id="", messages=[], token_ids=prompt, max_new_tokens=1)] * count
    drawn = torch.tensor([next(iter(action.token_ids or ())) for action in agent.act(requests)])
    top = (logits_of(model, prompt)[-1] / 0.3).topk(6)
    expected = top.values.softmax(-1) * count
    observed = torch.stack([(drawn == token).sum() for token in top.indices])
    assert int(observed.sum()) == count
    assert float(((observed - expected) ** 2 / expected).sum()) < 20.5  # chi-square, 5 degrees: p = 0.001


@settings(max_examples=15)
@given(order=st.permutations(range(4)), live=st.sets(st.integers(1, 3)))
def test_what_a_session_answers_depends_on_no_other(order: list[int], live: set[int]) -> None:
    model = model_of("llama")

    def output(called: list[list[int]]) -> list[list[list[int]]]:
        agent, sessions = PolicyAgent(model, TOKENIZER, seed=3), [Session(n) for n in range(4)]
        for names in called:
            play(agent, [sessions[n] for n in names], 5)
        return [session.output for session in sessions]

    everyone = [0, 1, 2, 3]
    wanted = output([everyone] * 3)
    got = output([everyone, order, [n for n in order if n == 0 or n in live]])
    assert got[0] == wanted[0]
    for n in live:
        assert got[n] == wanted[n]


def test_processes_that_share_a_batch_draw_as_one_would() -> None:
    model = model_of("llama")
    together, apart = [Session(n) for n in range(5)], [Session(n) for n in range(5)]
    one = PolicyAgent(model, TOKENIZER)
    one.reseed("train", 7)
    play(one, together, 6)
    for first, part in ((0, apart[:2]), (2, apart[2:])):
        agent = PolicyAgent(model, TOKENIZER)
        agent.reseed("train", 7, first=first)
        play(agent, part, 6)
    assert [session.output for session in together] == [session.output for session in apart]


def test_a_second_conversation_of_a_session_takes_no_other_sessions_draws() -> None:
    model = model_of("llama")

    def output(first: int, sessions: list[str]) -> list[list[list[int]]]:
        agent = PolicyAgent(model, TOKENIZER)
        agent.reseed("train", 7, first=first, sessions=sessions)
        requests = [TurnRequest(session_id=one, messages=[], token_ids=[5, 6], max_new_tokens=6) for one in sessions]
        # Without an agent_state each call begins a conversation; the sessions need not come in their own order.
        return [[list(action.token_ids or ()) for action in agent.act(requests[::-1])] for _ in range(2)]

    together = output(0, ["a", "b", "c", "d"])
    apart = [output(0, ["a", "b"]), output(2, ["c", "d"])]
    assert [apart[1][k] + apart[0][k] for k in range(2)] == together
    everything = [tuple(ids) for round_ in together for ids in round_]
    assert len(set(everything)) == 8


def test_a_call_that_failed_and_is_repeated_in_parts_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")
    sessions, unharmed = [Session(n) for n in range(3)], [Session(n) for n in range(3)]
    agent, other = PolicyAgent(model, TOKENIZER, seed=2), PolicyAgent(model, TOKENIZER, seed=2)
    forward = model.lm_head.forward
    for _ in range(2):
        play(other, unharmed, 6)
        requests, calls = [session.request(6) for session in sessions], iter(range(100))

        def fragile(hidden: torch.Tensor, calls: Iterator[int] = calls) -> torch.Tensor:
            if next(calls) == 2:
                raise MemoryError
            return forward(hidden)

        monkeypatch.setattr(model.lm_head, "forward", fragile)
        with pytest.raises(MemoryError):
            agent.act(requests)
        monkeypatch.undo()
        for session, request in zip(sessions, requests, strict=True):
            session.record(agent.act([request])[0])
    assert [session.output for session in sessions] == [session.output for session in unharmed]


def test_the_likeliest_alone_is_greedy() -> None:
    model = model_of("llama")
    likeliest, sessions = Session(1), Session(1)
    play(PolicyAgent(model, TOKENIZER, sampling=SamplingParams(top_k=1)), [likeliest], 12)
    play(greedy(model), [sessions], 12)
    assert likeliest.token_ids == sessions.token_ids


def test_a_repetition_penalty_holds_for_greedy_turns_too() -> None:
    model = model_of("llama")
    agent = PolicyAgent(model, TOKENIZER, sampling=SamplingParams(temperature=0, repetition_penalty=1e6))
    agent.stop_token_ids = frozenset()
    sessions = [Session(2), Session(3)]
    for limit in (3, 30):  # one ends early, and the other goes on in another row
        requests = [session.request(3 if n == 0 else limit) for n, session in enumerate(sessions)]
        for session, action in zip(sessions, agent.act(requests), strict=True):
            session.record(action)
    plain, free = greedy(model), Session(3)
    plain.stop_token_ids = frozenset()
    play(plain, [free], 3)
    play(plain, [free], 30)
    assert len(set(free.output[1])) < 30
    for session in sessions:
        for prompt, output in session.turns:
            assert len(set(output)) == len(output)
            assert not set(output) & set(prompt)


def test_a_penalty_is_that_of_transformers() -> None:
    contexts, scores = [[1, 3, 3], [0, 2, 4]], torch.tensor([[-2.0, -1, 0, 1, 2], [3.0, -3, 1, 0.5, -0.5]])
    wanted: Any = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(contexts), scores)  # type: ignore[arg-type]
    assert torch.equal(penalized(scores, seen_tokens(contexts, scores), 1.7), wanted)


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


def test_the_global_generators_are_neither_read_nor_changed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    first = sampled(PolicyAgent(model_of("llama"), TOKENIZER))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    torch.manual_seed(6)
    assert sampled(PolicyAgent(model_of("llama"), TOKENIZER)) == first


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


TEXTS = st.text("ab<>\né…", max_size=12)


@given(text=TEXTS, stop=st.lists(st.text("ab<>\né…", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(text: str, stop: list[str]) -> None:
    finder, ids = StopText(stop, TOKENIZER.decode), ids_of(text)
    found = next((n for n in range(1, len(ids) + 1) if finder.completed_by_last(ids[:n])), None)
    holding = [n for n in range(1, len(ids) + 1) if any(one in TOKENIZER.decode(ids[:n]) for one in stop)]
    assert found == (holding[0] if holding else None)
    if found:
        before = finder.before(TOKENIZER.decode(ids[:found]))
        assert text.startswith(before)
        assert not any(one in before for one in stop)
        assert any(text[len(before) :].startswith(one) for one in stop)


def test_stop_strings_are_those_of_transformers() -> None:
    stop = ["ab", "<", "\n\n"]
    finder, criteria = StopText(stop, TOKENIZER.decode), StopStringCriteria(TOKENIZER, stop)
    for text in ("xaab", "a b", "x\n\ny"[:3], "x\n", "<", "xyz", "a\nb", "..ab"):
        ids = ids_of(text)
        wanted = bool(criteria(torch.tensor([ids]), torch.zeros(1, 1))[0])  # type: ignore[arg-type]
        assert finder.completed_by_last(ids) == wanted


def test_a_long_text_of_tokens_that_are_nothing_is_searched_far_enough() -> None:
    texts = {0: "", 1: "sto", 2: "p!", 3: "x" * 3}
    finder = StopText(["stop"], lambda ids: "".join(texts[token] for token in ids))
    assert finder.completed_by_last([3] * 50 + [1] + [0] * 100 + [2])
    assert not finder.completed_by_last([3] * 50 + [1] + [0] * 100)


def test_a_stop_string_ends_the_text_and_the_ids_stay() -> None:
    model = new_model("llama")
    plain = PolicyAgent(model, TOKENIZER, seed=5)
    plain.stop_token_ids = frozenset()
    free = [Session(n) for n in range(6)]
    play(plain, free, 20)
    texts = [TOKENIZER.decode(session.output[0]) for session in free]
    stop = [texts[0][3:5], texts[1][-1], texts[2][0]]
    agent = PolicyAgent(model, TOKENIZER, seed=5, sampling=SamplingParams(stop=stop))
    agent.stop_token_ids = frozenset()
    sessions = [Session(n) for n in range(6)]
    for session, action, other in zip(sessions, play(agent, sessions, 20), free, strict=True):
        output = session.output[0]
        assert output == other.output[0][: len(output)]
        assert len(action.logprobs or ()) == len(output)
        stopped = any(one in TOKENIZER.decode(output) for one in stop)
        assert action.finish_reason == ("stop" if stopped else "length")
        assert not any(one in action.text for one in stop)
        assert not any(one in TOKENIZER.decode(output[:-1]) for one in stop)
    assert len(sessions[2].output[0]) == 1 < len(free[2].output[0])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temperature": -1}, "temperature must be a non-negative number, got -1"),
        ({"temperature": "0.5"}, "temperature must be a non-negative number, got '0.5'"),
        ({"min_p": "0.1"}, "min_p must be None or between 0 and 1, got '0.1'"),
        ({"top_k": -3}, "top_k must be 0 or a positive whole number, got -3"),
        ({"top_k": 1.5}, "top_k must be 0 or a positive whole number, got 1.5"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"min_p": -0.1}, "min_p must be None or between 0 and 1, got -0.1"),
        ({"min_p": 2}, "min_p must be None or between 0 and 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a positive number, got 0"),
        ({"temperature": float("nan")}, "temperature must be a non-negative number, got nan"),
        ({"stop": "\n"}, "stop must be a sequence of non-empty strings, got '\\n'"),
        ({"stop": ("a", "")}, r"stop must be a sequence of non-empty strings, got \('a', ''\)"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("\\n", r"\\n")):
        SamplingParams(**options)
