"""Means by turn index: against loops over tokens, and against what TRL's loss counts itself."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trl_interface import CLIPPED, EPSILON, played, prepared

from agentsgym.training._trl import TRLInterface
from agentsgym.training.metrics.loss import STATISTICS, TurnStatistics, clipped
from agentsgym.training.tensors.loss_types import LOSS_TYPES

NUM_TURNS = 4
Values = dict[str, torch.Tensor]


def of_this_rank(sums: torch.Tensor) -> torch.Tensor:
    return sums


def micro_batch(seed: int) -> tuple[torch.Tensor, Values]:
    """Turn indices, of which some are none and some too late, and values that are not finite off the agent tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(torch.randint(1, 6, (2,), generator=generator).tolist())
    turn_index = torch.randint(-1, NUM_TURNS + 2, shape, generator=generator)
    values = {name: torch.randn(shape, generator=generator) for name in STATISTICS}
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
    statistics = TurnStatistics(NUM_TURNS)
    batches = [micro_batch(seed) for seed in seeds]
    for turn_index, values in batches:
        statistics.add(turn_index, **values)
    assert statistics.metrics(of_this_rank) == pytest.approx(by_hand(batches), rel=1e-4, abs=1e-5)
    assert statistics.metrics(of_this_rank) == {}  # it starts anew


@given(st.lists(st.lists(st.integers(0, 2**32), max_size=3), min_size=2, max_size=3))
def test_all_ranks_get_the_means_over_the_tokens_of_all_under_equal_names(ranks: list[list[int]]) -> None:
    batches = [[micro_batch(seed) for seed in seeds] for seeds in ranks]
    all_statistics = [TurnStatistics(NUM_TURNS) for _ in ranks]
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
        metrics = TurnStatistics(NUM_TURNS).metrics(lambda _: total)
        assert metrics == pytest.approx(by_hand([batch for own in batches for batch in own]), rel=1e-4, abs=1e-5)


def test_the_names_by_hand() -> None:
    statistics = TurnStatistics(num_turns=2, names=("ratio", "advantage"))
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
    statistics = TurnStatistics(1, names=("entropy",))
    statistics.add(torch.zeros(1, 2, dtype=torch.long), entropy=torch.ones(1, 2, requires_grad=True))
    assert statistics.metrics(of_this_rank) == {"entropy/turn_00": 1.0}


def test_other_names_than_were_agreed_are_refused() -> None:
    turn_index = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="expected the statistics ratio, got entropy"):
        TurnStatistics(names=("ratio",)).add(turn_index, entropy=torch.ones(1, 2))
    with pytest.raises(ValueError, match="expected the statistics ratio, got none"):
        TurnStatistics(names=("ratio",)).add(turn_index)
    for nothing in ({"num_turns": 0}, {"names": ()}):
        with pytest.raises(ValueError, match="statistics need a turn and a name"):
            TurnStatistics(**nothing)


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
    batch["old_per_token_logps"] = TRLInterface(trainer).score(trainer.model, *scored)[0] - ratio.log()
    trainer.compute_loss(trainer.model, batch)
    key = "cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"
    [counted] = trainer._metrics["train"][key]

    bounds = LOSS_TYPES[loss_type].clip_bounds(epsilon_low=EPSILON, epsilon_high=epsilon_high)
    assert bounds is not None
    flags = clipped(ratio, batch["advantages"], low=bounds[0], high=bounds[1])
    statistics = TurnStatistics(1, names=("clip_ratio",))
    statistics.add(mask - 1, clip_ratio=flags)
    assert 0 < counted < 1
    assert statistics.metrics(of_this_rank)["clip_ratio/turn_00"] == pytest.approx(counted)
