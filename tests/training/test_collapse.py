"""What is reported of a policy that stops exploring, or that answers without reading its prompt."""

from __future__ import annotations

import logging
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from games import GuessNumber, logged, policy, tasks, trainer_of
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import PolicyAgent
from agentsgym.training.metrics.diagnostics import MAX_TURNS, CollapseWatch, drawn_turns, prompt_dependence

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
