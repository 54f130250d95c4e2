from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from games import GuessNumber, TextAgent, policy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentsgym import ConfigError, Message, PolicyAgent, SamplingParams, StopReason, Trajectory, Turn, logprob_gap
from agentsgym.batch.views import transitions
from agentsgym.training.drift import Drift

TASKS = [{"seed": seed} for seed in range(3)]


def sampled(model: Any, tokenizer: Any, *, tasks: Any = TASKS, temperature: float = 1.0, **config: Any) -> Any:
    agent = PolicyAgent(model, tokenizer, sampling=SamplingParams(temperature=temperature), max_turn_tokens=4)
    return GuessNumber(tokenizer, config).rollout(tasks, agent, 2)


def perturbed(model: PreTrainedModel, size: float) -> PreTrainedModel:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in other.parameters():
            weights.add_(size * torch.randn(weights.shape, generator=generator))
    return other


def token_by_token(model: Any, trajectory: Trajectory, temperature: float = 1.0) -> list[list[float]]:
    """The log-probability of each token of each turn, from the exact prompt of the turn and one pass a token."""
    nested = transitions([trajectory])
    turns = []
    for prompt, ids in zip(nested["prompt_ids"][0], nested["ids"][0], strict=True):
        scores = []
        for place, token in enumerate(ids):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids[:place]])).logits[0, -1]
            scores.append((logits / temperature).log_softmax(-1)[token].item())
        turns.append(scores)
    return turns


def with_logprobs(trajectory: Trajectory, turns: list[list[float]]) -> Trajectory:
    values = [0.0] * len(trajectory.token_ids)
    for turn, scores in zip(trajectory.turns, turns, strict=True):
        values[turn.start : turn.stop] = scores
    return dataclasses.replace(trajectory, logprobs=values)


def output(token_ids: list[int], *turns: Turn, logprobs: list[float] | None) -> Trajectory:
    messages: list[Message] = []
    return Trajectory(
        token_ids=token_ids,
        turns=turns,
        messages=messages,
        final_reward=0.0,
        stop_reason=StopReason.DONE,
        logprobs=logprobs,
    )


def bigram_model() -> LlamaForCausalLM:
    """Two tokens: after 0 come (1/4, 3/4), after 1 (1/2, 1/2), whatever stood before."""
    config = LlamaConfig(
        vocab_size=2,
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    layer: Any = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(2))  # normed to the square root of 2 times itself
        wanted = torch.tensor([[1 / 4, 1 / 2], [3 / 4, 1 / 2]]).log()  # (next, last)
        model.lm_head.weight.copy_(wanted / math.sqrt(2))
    return model


# Sampler and model agree


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_a_policy_that_sampled_itself_has_no_drift(temperature: float) -> None:
    model, tokenizer = policy()
    trajectories = sampled(model, tokenizer, temperature=temperature)
    drift = logprob_gap(model, trajectories, temperature=temperature, batch_size=4)
    assert drift.largest_gap < 1e-5
    assert drift.num_tokens == sum(sum(row.agent_token_mask) for row in trajectories) > 20
    assert (drift.ratio_min, drift.ratio_mean, drift.ratio_max) == pytest.approx((1, 1, 1), abs=1e-5)
    assert abs(drift.kl_k1) < 1e-5
    assert 0 <= drift.kl_k3 < 1e-9
    assert drift.num_without_logprobs == drift.num_inexact_turns == drift.num_without_context == 0


def test_rows_that_a_budget_cut_have_no_drift() -> None:
    model, tokenizer = policy()
    trajectories = sampled(model, tokenizer, max_trajectory_tokens=24, max_steps_per_episode=20)
    assert {row.stop_reason for row in trajectories} & {StopReason.MAX_TOKENS}
    assert any(row.token_ids[turn.stop - 1] != tokenizer.eos_token_id for row in trajectories for turn in row.turns)
    assert logprob_gap(model, trajectories).largest_gap < 1e-5


def test_trials_and_failed_rollouts_have_no_drift() -> None:
    model, tokenizer = policy()
    tasks = [{"seed": 0}, {"seed": 1, "breaks": True}]
    trajectories = sampled(model, tokenizer, tasks=tasks, episodes_per_trial=2, keep_history=True)
    assert any(row.failed for row in trajectories)
    assert logprob_gap(model, trajectories).largest_gap < 1e-5


def test_each_segment_is_scored_with_its_own_context() -> None:
    model, _ = policy()
    ids = [7, 8, 9, 10, 11, 12, 7, 13, 10, 8, 9, 14, 15]
    turns = [
        Turn(start=2, stop=4, reward=0.0),
        Turn(start=6, stop=8, reward=0.0),
        Turn(start=9, stop=11, reward=0.0, prompt_start=8),
        Turn(start=12, stop=13, reward=0.0, prompt_start=8),
    ]
    trajectory = output(ids, *turns, logprobs=None)
    exact = with_logprobs(trajectory, token_by_token(model, trajectory))
    assert len(exact.segments) == 2
    drift = logprob_gap(model, [exact])
    assert drift.largest_gap < 1e-5
    assert drift.num_tokens == 7
    in_one = dataclasses.replace(exact, turns=[dataclasses.replace(turn, prompt_start=0) for turn in turns])
    wrong = logprob_gap(model, [in_one])
    assert wrong.largest_gap > 1e-2
    assert wrong.turn >= 2


# Sampler and model differ


def test_the_gap_grows_with_the_change_of_the_weights() -> None:
    model, tokenizer = policy()
    trajectories = sampled(model, tokenizer)
    gaps = [logprob_gap(perturbed(model, size), trajectories) for size in (0.0, 1e-3, 1e-2, 1e-1)]
    assert [gap.largest_gap for gap in gaps] == sorted(gap.largest_gap for gap in gaps)
    assert [gap.kl_k3 for gap in gaps] == sorted(gap.kl_k3 for gap in gaps)
    assert gaps[0].largest_gap < 1e-5
    assert gaps[1].largest_gap > 1e-3


def test_another_temperature_is_a_gap() -> None:
    model, tokenizer = policy()
    trajectories = sampled(model, tokenizer, temperature=0.5)
    assert logprob_gap(model, trajectories, temperature=1.0).largest_gap > 0.1


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_all_numbers_are_those_of_one_pass_a_token(batch_size: int, temperature: float) -> None:
    model, tokenizer = policy()
    trajectories = sampled(model, tokenizer, temperature=temperature)
    other = perturbed(model, 0.05)
    drift = logprob_gap(other, trajectories, temperature=temperature, batch_size=batch_size, pad_token_id=5)
    differences = {}  # log q - log p, by place
    for index, trajectory in enumerate(trajectories):
        for k, scores in enumerate(token_by_token(other, trajectory, temperature)):
            for place, score in enumerate(scores, trajectory.turns[k].start):
                differences[index, k, place] = trajectory.logprobs[place] - score
    values = list(differences.values())
    ratios = [math.exp(-value) for value in values]
    mean = 1 / len(values)
    assert drift.largest_gap == pytest.approx(max(map(abs, values)), abs=1e-5)
    assert abs(differences[drift.trajectory, drift.turn, drift.token]) == pytest.approx(drift.largest_gap, abs=1e-5)
    assert drift.mean_gap == pytest.approx(mean * sum(map(abs, values)), abs=1e-5)
    assert drift.kl_k1 == pytest.approx(mean * sum(values), abs=1e-5)
    assert drift.kl_k3 == pytest.approx(mean * sum(r - 1 - math.log(r) for r in ratios), abs=1e-5)
    assert (drift.ratio_min, drift.ratio_max) == pytest.approx((min(ratios), max(ratios)), abs=1e-4)
    assert drift.ratio_mean == pytest.approx(mean * sum(ratios), abs=1e-4)


def test_the_numbers_of_two_tokens_by_hand() -> None:
    # After 0 the model answers 1 with 3/4, the sampler answered it with 1/2; after 1 both answer 0 with 1/2.
    turn = Turn(start=1, stop=3, reward=0.0)
    trajectory = output([0, 1, 0], turn, logprobs=[0.0, math.log(1 / 2), math.log(1 / 2)])
    drift = logprob_gap(bigram_model(), [trajectory])
    gap = math.log(3 / 2)
    assert dataclasses.asdict(drift) == pytest.approx(
        dataclasses.asdict(
            Drift(
                num_tokens=2,
                largest_gap=gap,
                mean_gap=gap / 2,
                trajectory=0,
                turn=0,
                token=1,
                kl_k1=-gap / 2,
                kl_k3=(1 / 2 - gap) / 2,
                ratio_min=1.0,
                ratio_mean=1.25,
                ratio_max=1.5,
            )
        ),
        abs=1e-6,
    )
    assert str(drift).startswith("2 tokens: largest gap 4.05e-01 (trajectory 0, turn 0, token 1), mean gap 2.03e-01")


def test_the_temperature_flattens_by_hand() -> None:
    # At 2 the probabilities after 0 are as the square roots of 1/4 and 3/4.
    trajectory = output([0, 1], Turn(start=1, stop=2, reward=0.0), logprobs=[0.0, -1.0])
    drift = logprob_gap(bigram_model(), [trajectory], temperature=2.0)
    assert drift.kl_k1 == pytest.approx(-1 - math.log(math.sqrt(3) / (1 + math.sqrt(3))), abs=1e-6)


def test_a_recorded_nan_is_not_hidden() -> None:
    trajectory = output([0, 1, 0], Turn(start=1, stop=3, reward=0.0), logprobs=[0.0, -0.1, math.nan])
    drift = logprob_gap(bigram_model(), [trajectory])
    assert math.isnan(drift.largest_gap)
    assert (drift.turn, drift.token) == (0, 2)


# What is left out


def test_what_cannot_be_compared_is_left_out_and_counted() -> None:
    trajectories = [
        output([0, 1], Turn(start=1, stop=2, reward=0.0), logprobs=None),
        output(
            [0, 1, 1, 0, 1],
            Turn(start=0, stop=1, reward=0.0),
            Turn(start=1, stop=2, reward=0.0, exact=False),
            Turn(start=3, stop=4, reward=0.0),
            Turn(start=4, stop=4, reward=0.0),
            logprobs=[-1.0, -50.0, 0.0, math.log(1 / 2), -9.0],
        ),
    ]
    drift = logprob_gap(bigram_model(), trajectories)
    assert drift.num_tokens == 1
    assert drift.largest_gap < 1e-5
    assert (drift.trajectory, drift.turn, drift.token) == (1, 2, 3)
    assert (drift.num_without_logprobs, drift.num_inexact_turns, drift.num_without_context) == (1, 1, 1)
    assert str(drift).endswith(
        "skipped 1 trajectories without log-probabilities, 1 turns that were tokenized from text, and 1 "
        "tokens without context"
    )


def test_a_comparison_of_nothing_is_an_error() -> None:
    model, tokenizer = policy()
    trajectories = GuessNumber(tokenizer).rollout(TASKS, TextAgent())
    with pytest.raises(ConfigError, match=r"none of the 3 trajectories has .* \(skipped 3 trajectories without"):
        logprob_gap(model, trajectories)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"temperature": -1.0}, "non-negative number, got -1.0"), ({"batch_size": 0}, "positive int, got 0")],
)
def test_a_number_out_of_range_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        logprob_gap(bigram_model(), [], **arguments)


# What is done to the model


def dropping_model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def test_dropout_is_off_and_every_module_gets_its_own_mode_back() -> None:
    model = dropping_model().eval()
    trajectory = output([3, 4, 5], Turn(start=1, stop=3, reward=0.0), logprobs=None)
    exact = with_logprobs(trajectory, token_by_token(model, trajectory))
    model.train()
    model.transformer.drop.eval()
    before = [module.training for module in model.modules()]
    assert logprob_gap(model, [exact]).largest_gap < 1e-5
    assert [module.training for module in model.modules()] == before
    beyond = dataclasses.replace(exact, token_ids=[3, 4, 99])
    with pytest.raises(IndexError):
        logprob_gap(model, [beyond])
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
