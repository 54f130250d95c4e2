"""The metrics of drift: of one batch, of all ranks, and of nothing at all."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from games import policy
from hypothesis import given
from hypothesis import strategies as st
from test_drift import perturbed, sampled
from trl import GRPOTrainer

from agentsgym import audit, logprob_gap
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.training.tensors.importance import LogprobGapSums, gap_metrics
from agentsgym.training.tensors.token_batch import TokenBatch


def drift_metrics(recorded: torch.Tensor, recomputed: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    found = gap_metrics([LogprobGapSums.of(recorded, recomputed, mask)])
    return {name: value for name, value in found.items() if "effective_sample_size" not in name}


def test_the_names_that_trl_has_are_trls() -> None:
    source = inspect.getsource(GRPOTrainer)
    names = drift_metrics(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    assert [name for name in names if name not in source] == ["sampling/kl/k1", "sampling/kl/k3"]
    assert len(names) == 7


def test_the_metrics_of_marked_tokens_by_hand() -> None:
    recorded = torch.tensor([[-9.0, -1.0, -2.0], [-1.0, math.nan, -9.0]])
    recomputed = torch.tensor([[0.0, -1.5, -1.0], [-1.0, -1.0, 0.0]])
    metrics = drift_metrics(recorded, recomputed, torch.tensor([[0, 1, 1], [1, 1, 0]]))
    ratios = [math.exp(-0.5), math.exp(1.0), 1.0]
    assert metrics == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": 0.5,
            "sampling/sampling_logp_difference/max": 1.0,
            "sampling/importance_sampling_ratio/min": min(ratios),
            "sampling/importance_sampling_ratio/mean": sum(ratios) / 3,
            "sampling/importance_sampling_ratio/max": max(ratios),
            "sampling/kl/k1": (0.5 - 1.0) / 3,
            "sampling/kl/k3": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 3,
        }
    )


def test_the_metrics_of_all_ranks_are_those_of_one_batch_that_holds_their_rows() -> None:
    recorded, recomputed = -3 * torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    parts = [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]
    ranks = [
        LogprobGapSums.of(recorded[part], recomputed[part], mask[part]) for part in parts
    ]  # the third has no token
    ratios = (recomputed - recorded)[mask.bool()].double().exp()
    of_tokens = (ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())).item()
    assert gap_metrics(ranks) == pytest.approx(
        drift_metrics(recorded, recomputed, mask)
        | {"sampling/effective_sample_size": 1.0, "sampling/effective_sample_size_of_tokens": of_tokens}
    )


@pytest.mark.parametrize(("num_cut", "fraction"), [((None, None), None), ((1, 2), 3 / 5), ((0, 0), 0.0)])
def test_rows_of_all_ranks_share_a_sample_size_and_cuts_are_a_fraction_of_all_agent_tokens(
    num_cut: tuple[int | None, int | None], fraction: float | None
) -> None:
    recorded = torch.tensor([[-1.0, math.nan, -1.0]])  # what the sampler does not know is an agent token too
    masks = torch.ones(1, 3), torch.tensor([[1, 0, 1]])
    log_ratios = [0.0, 0.0], [-1000.0, -1000.0]
    ranks = [
        LogprobGapSums.of(recorded, recorded, mask, row_log_ratios=own, num_cut=cut)
        for mask, own, cut in zip(masks, log_ratios, num_cut, strict=True)
    ]
    metrics = gap_metrics(ranks)
    assert metrics["sampling/effective_sample_size"] == 0.5
    assert metrics.get("sampling/cut_fraction") == fraction


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("recorded", [0.0, math.nan])
def test_without_a_token_there_is_no_drift_and_every_name(shape: tuple[int, int], recorded: float) -> None:
    mask = torch.full(shape, int(math.isnan(recorded)))
    metrics = drift_metrics(torch.full(shape, recorded), torch.full(shape, -3.0), mask)
    assert metrics.keys() == drift_metrics(torch.zeros(1), torch.zeros(1), torch.ones(1)).keys()
    assert {name: value for name, value in metrics.items() if value} == {
        f"sampling/importance_sampling_ratio/{what}": 1.0 for what in ("min", "mean", "max")
    }


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=20))
def test_the_metrics_hold_their_inequalities(pairs: list[tuple[float, float]]) -> None:
    recorded, recomputed = (torch.tensor([row], dtype=torch.float64) for row in zip(*pairs, strict=True))
    metrics = {
        name.removeprefix("sampling/"): value
        for name, value in drift_metrics(recorded, recomputed, torch.ones_like(recorded)).items()
    }
    low, mean, high = (metrics[f"importance_sampling_ratio/{what}"] for what in ("min", "mean", "max"))
    assert 0 < low <= mean * (1 + 1e-9)
    assert mean <= high * (1 + 1e-9)
    assert metrics["kl/k3"] >= 0
    assert abs(metrics["kl/k1"]) <= metrics["sampling_logp_difference/mean"] * (1 + 1e-9) + 1e-12
    assert metrics["sampling_logp_difference/mean"] <= metrics["sampling_logp_difference/max"] * (1 + 1e-9)


def test_the_metrics_of_a_batch_are_the_gap_of_its_trajectories() -> None:
    model, tokenizer = policy()
    trajectories = sampled(model, tokenizer)
    assert audit(trajectories, vocabulary_size=len(tokenizer)).ok
    other = perturbed(model, 0.05)
    drift = logprob_gap(other, trajectories)
    rows = [row for index, trajectory in enumerate(trajectories) for row in trajectory_rows(index, trajectory)]
    batch = TokenBatch.stack(trajectories, rows, pad_token_id=0)
    recorded = batch.recorded_logprobs
    assert recorded is not None
    with torch.no_grad():
        logits = other(batch.ids, attention_mask=batch.attention_mask).logits[:, :-1]
    recomputed = torch.zeros(batch.ids.shape)
    recomputed[:, 1:] = logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    metrics = drift_metrics(recorded, recomputed, batch.agent_token_mask([True] * len(trajectories)))
    assert list(metrics.values()) == pytest.approx(
        [
            drift.mean_gap,
            drift.largest_gap,
            drift.ratio_min,
            drift.ratio_mean,
            drift.ratio_max,
            drift.kl_k1,
            drift.kl_k3,
        ],
        abs=1e-5,
    )
