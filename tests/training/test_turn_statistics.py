"""Means by turn index against loops over tokens, and signs of a policy that stops exploring or reading."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, tasks, trainer_of
from hypothesis import given
from hypothesis import strategies as st
from test_trl_interface import CLIPPED, EPSILON, played, prepared

from agentsgym import PolicyAgent
from agentsgym.training._trl import TRLInterface
from agentsgym.training.metrics.diagnostics import MAX_TURNS, CollapseWatch, drawn_turns, prompt_dependence
from agentsgym.training.metrics.loss import TurnStatistics, clipped
from agentsgym.training.tensors.loss_types import LOSS_TYPES

NUM_TURNS = 4
NAMES = ("entropy", "ratio", "clip_ratio", "advantage")
Values = dict[str, torch.Tensor]


def of_this_rank(sums: torch.Tensor) -> torch.Tensor:
    return sums


def micro_batch(seed: int) -> tuple[torch.Tensor, Values]:
    """Turn indices, of which some are none and some too late, and values that are not finite off the agent tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(torch.randint(1, 6, (2,), generator=generator).tolist())
    turn_index = torch.randint(-1, NUM_TURNS + 2, shape, generator=generator)
    values = {name: torch.randn(shape, generator=generator) for name in NAMES}
    values["clip_ratio"] = values["clip_ratio"] > 0
    values["ratio"] = values["ratio"].exp().masked_fill(turn_index == -1, math.inf)
    values["entropy"] = values["entropy"].masked_fill(turn_index == -1, math.nan)
    return turn_index, values


def by_hand(batches: list[tuple[torch.Tensor, Values]]) -> dict[str, float]:
    """The mean of each value over the tokens of each turn index, in a loop."""
    tokens: defaultdict[str, list[float]] = defaultdict(list)
    for turn_index, values in batches:
        for place, k in enumerate(turn_index.flatten().tolist()):
            if 0 <= k < NUM_TURNS:
                for name, own in values.items():
                    tokens[f"{name}/turn_{k:02d}"].append(float(own.flatten()[place]))
    return {name: sum(numbers) / len(numbers) for name, numbers in tokens.items()}


@given(st.lists(st.integers(0, 2**32), max_size=5))
def test_means_are_those_of_a_loop_over_all_micro_batches(seeds: list[int]) -> None:
    statistics = TurnStatistics(NAMES, NUM_TURNS)
    batches = [micro_batch(seed) for seed in seeds]
    for turn_index, values in batches:
        statistics.add(turn_index, **values)
    assert statistics.metrics(of_this_rank) == pytest.approx(by_hand(batches), rel=1e-4, abs=1e-5)
    assert statistics.metrics(of_this_rank) == {}  # it starts anew


@given(st.lists(st.lists(st.integers(0, 2**32), max_size=3), min_size=2, max_size=3))
def test_all_ranks_get_the_means_over_the_tokens_of_all_under_equal_names(ranks: list[list[int]]) -> None:
    batches = [[micro_batch(seed) for seed in seeds] for seeds in ranks]
    all_statistics = [TurnStatistics(NAMES, NUM_TURNS) for _ in ranks]
    sent: list[torch.Tensor] = []
    for statistics, own in zip(all_statistics, batches, strict=True):
        for turn_index, values in own:
            statistics.add(turn_index, **values)

    def send(sums: torch.Tensor) -> torch.Tensor:
        sent.append(sums.clone())
        return sums

    for statistics in all_statistics:
        statistics.metrics(send)
    assert len(sent) == len(ranks)  # one tensor each, of one shape, also where a rank had no micro-batch
    total = torch.stack(sent).sum(0)
    for _ in ranks:
        metrics = TurnStatistics(NAMES, NUM_TURNS).metrics(lambda _: total)
        assert metrics == pytest.approx(by_hand([batch for own in batches for batch in own]), rel=1e-4, abs=1e-5)


def test_the_names_by_hand() -> None:
    statistics = TurnStatistics(("ratio", "advantage"), num_turns=2)
    turn_index = torch.tensor([[-1, 0, 0, -1, 1], [-1, 0, -1, 2, 2]])
    ratio = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0], [9.0, 3.0, 9.0, 9.0, 9.0]])
    statistics.add(turn_index, ratio=ratio, advantage=torch.tensor([[0.5], [-1.0]]))  # one number a row
    assert statistics.metrics(of_this_rank) == {
        "ratio/turn_00": 2.0,
        "advantage/turn_00": 0.0,
        "ratio/turn_01": 4.0,
        "advantage/turn_01": 0.5,
    }


def test_values_are_read_without_their_gradient() -> None:
    statistics = TurnStatistics(("entropy",), 1)
    statistics.add(torch.zeros(1, 2, dtype=torch.long), entropy=torch.ones(1, 2, requires_grad=True))
    assert statistics.metrics(of_this_rank) == {"entropy/turn_00": 1.0}


def test_clipped_by_hand() -> None:
    ratio = torch.tensor([[0.5, 0.5, 1.0, 1.0, 1.5, 1.5]])
    advantages = torch.tensor([[1.0, -1.0] * 3])
    assert clipped(ratio, advantages, low=0.8, high=1.2).tolist() == [[False, True, False, False, True, False]]
    one_sided = LOSS_TYPES["cispo"].clip_bounds(epsilon_low=0.2, epsilon_high=1.2)
    assert one_sided == (-math.inf, 1.2)
    assert clipped(ratio, advantages, low=one_sided[0], high=one_sided[1]).tolist() == [[False] * 4 + [True, False]]
    assert not clipped(ratio, 0 * advantages, low=0.8, high=1.2).any()


@pytest.mark.parametrize("loss_type", ["sapo", "vespo"])
def test_a_loss_without_a_clip_has_no_bounds(loss_type: str) -> None:
    assert LOSS_TYPES[loss_type].clip_bounds(epsilon_low=0.2, epsilon_high=0.2) is None


@pytest.mark.parametrize("loss_type", [*CLIPPED, "cispo"])
def test_clipped_tokens_are_those_that_trl_counts(loss_type: str, tmp_path: Path) -> None:
    epsilon_high = 1.4  # to CISPO a bound, to the others a distance from 1
    trainer = prepared(tmp_path, loss_type=loss_type, epsilon_high=epsilon_high)
    batch = played(trainer)
    mask: Any = batch["agent_token_mask"]
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.35, 1.5, 3.0]).repeat(mask.shape[1])[: mask.shape[1]].expand(mask.shape)
    scored = batch["prompt_completion_ids"], batch["attention_mask"], mask
    batch["old_per_token_logps"] = TRLInterface(trainer).score(*scored)[0] - ratio.log()
    trainer.compute_loss(trainer.model, batch)
    key = "cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"
    [counted] = trainer._metrics["train"][key]

    bounds = LOSS_TYPES[loss_type].clip_bounds(epsilon_low=EPSILON, epsilon_high=epsilon_high)
    assert bounds is not None
    flags = clipped(ratio, batch["advantages"], low=bounds[0], high=bounds[1])
    statistics = TurnStatistics(("clip_ratio",), 1)
    statistics.add(mask - 1, clip_ratio=flags)
    assert 0 < counted < 1
    assert statistics.metrics(of_this_rank)["clip_ratio/turn_00"] == pytest.approx(counted)


KEYS = ("prompt_dependence/mutual_information", "prompt_dependence/retrieval")


def scorer(model: Any) -> Any:
    """Score labeled tokens by a plain forward pass of each row alone."""

    def score(ids: torch.Tensor, attention: torch.Tensor, labeled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.zeros(ids.shape)
        for row, (own, kept, is_scored) in enumerate(zip(ids, attention, labeled, strict=True)):
            length = int(kept.sum())
            with torch.no_grad():
                logits = model(input_ids=own[None, :length]).logits[0, :-1].log_softmax(-1)
            found[row, 1:length] = logits.gather(1, own[1:length, None])[:, 0]
            found[row] *= is_scored
        return found, found

    return score


def test_the_information_of_a_model_is_that_of_its_probabilities() -> None:
    model, _ = policy()
    exchanges = [([3, 4, 5], [6, 7]), ([8, 9], [10]), ([4], [11, 12, 13])]
    found = prompt_dependence(exchanges, scorer(model), 0)

    def logp(prompt: list[int], answer: list[int]) -> float:
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].double().log_softmax(-1)
        return sum(float(logits[len(prompt) + n - 1, token]) for n, token in enumerate(answer))

    table = {(i, j): logp(exchanges[i][0], exchanges[j][1]) for i, j in product(range(3), range(3))}
    mean = [sum(math.exp(table[i, j]) for i in range(3)) / 3 for j in range(3)]
    expected = sum(table[j, j] - math.log(mean[j]) for j in range(3)) / 3
    right = sum(all(table[j, j] > table[i, j] for i in range(3) if i != j) for j in range(3)) / 3
    assert found == {KEYS[0]: pytest.approx(expected, abs=1e-5), KEYS[1]: pytest.approx(right)}


@given(st.integers(2, MAX_TURNS), st.booleans(), st.floats(-50, 0))
def test_its_bounds_are_0_for_answers_to_nothing_and_log_n_for_answers_to_one_prompt(
    size: int, reads: bool, logprob: float
) -> None:
    def score(ids: torch.Tensor, attention: torch.Tensor, labeled: torch.Tensor) -> Any:
        is_own = ids[:, 0] == ids[:, 1]  # a prompt of one token, and an answer of the same
        own = torch.full(is_own.shape, logprob).where(is_own | (not reads), torch.tensor(logprob - 80.0))
        return labeled * own[:, None], None

    found = prompt_dependence([([n], [n]) for n in range(size)], score, 0)
    assert found[KEYS[0]] == pytest.approx(math.log(size) if reads else 0.0, abs=1e-5)
    assert found[KEYS[1]] == float(reads)


def test_a_turn_of_each_group_is_drawn_with_its_exact_prompt() -> None:
    env, agent = GuessNumber(policy()[1]), PolicyAgent(*policy(), max_turn_tokens=4)
    played = env.rollout([{"seed": seed} for seed in range(12)], agent, num_rollouts=2)
    groups = [index // 2 for index in range(24)]
    exchanges = drawn_turns(played, groups, seed=3)
    assert len(exchanges) == MAX_TURNS
    spans = {
        (tuple(one.token_ids[turn.prompt_start : turn.start]), tuple(one.token_ids[turn.start : turn.stop]))
        for one in played
        for turn in one.turns
    }
    assert all((tuple(prompt), tuple(answer)) in spans for prompt, answer in exchanges)
    assert drawn_turns(played, groups, seed=3) == exchanges != drawn_turns(played, groups, seed=4)


def test_a_run_logs_it_whenever_the_sampler_is_compared(tmp_path: Path) -> None:
    with trainer_of(tmp_path, drift_interval=2, max_steps=4, dataset=tasks(8)) as trainer:
        trainer.train()
    for key in KEYS:
        assert len(logged(trainer, key)) == 2
    assert all(-0.01 <= value <= math.log(2) + 0.01 for value in logged(trainer, KEYS[0]))


def watched(caplog: pytest.LogCaptureFixture, batches: list[tuple[dict[str, float], float | None]]) -> list[str]:
    watch = CollapseWatch()
    with caplog.at_level(logging.WARNING):
        for metrics, entropy in batches:
            watch.add(metrics, entropy)
    return [record.getMessage() for record in caplog.records]


STUCK = {"win_rate": 0.5, "frac_reward_zero_std": 0.75}


def test_a_certain_policy_that_does_not_win_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    [message] = watched(caplog, [(STUCK, 1.0)] * 5 + [(STUCK, 0.05)] * 20)
    assert "0.050 nats per token, 1.000 at the start" in message
    assert "75 % of the task groups" in message


@pytest.mark.parametrize(
    ("metrics", "entropy"),
    [
        ({**STUCK, "win_rate": 0.95}, 0.05),  # it has learned its tasks
        ({**STUCK, "frac_reward_zero_std": 0.25}, 0.05),  # its groups still differ
        (STUCK, 0.3),
        (STUCK, None),
    ],
)
def test_other_policies_are_not(caplog: pytest.LogCaptureFixture, metrics: Any, entropy: float | None) -> None:
    assert not watched(caplog, [(STUCK, 1.0)] * 5 + [(metrics, entropy)] * 20)


def test_answers_that_no_longer_depend_on_prompts_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def batch(information: float) -> tuple[dict[str, float], None]:
        return {"win_rate": 0.5, KEYS[0]: information}, None

    assert not watched(caplog, [batch(0.1)] * 5 + [batch(0.0)] * 5)  # they never did
    [message] = watched(caplog, [*map(batch, (0.5, 1.5, 1.0, 0.1, 0.1, 0.1, 0.1))])
    assert "their mutual information is 0.10 nats, 1.50 at its highest" in message
