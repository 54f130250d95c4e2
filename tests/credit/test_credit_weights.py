"""Weights a turn: each aggregation against the mean it is named after, written out as loops over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.credit.weights import AGGREGATIONS, INVALID_TURN_MODES, aggregation_weights, invalid_turn_weights
from agentsgym.errors import ConfigError

CONSTANT = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch:
    """A rollout with the loss of each of its tokens, turn by turn."""

    losses: list[list[float]]
    group: int
    included: bool

    @property
    def tokens(self) -> list[float]:
        return [loss for turn in self.losses for loss in turn]


batches = st.lists(
    st.builds(
        GenerationBatch,
        losses=st.lists(st.lists(st.floats(-10, 10), max_size=3), max_size=4),
        group=st.integers(0, 2),
        included=st.booleans(),
    ),
    max_size=6,
)


def weights_of(batch: list[GenerationBatch], aggregation: str) -> list[list[float]]:
    return aggregation_weights(
        [[len(turn) for turn in rollout.losses] for rollout in batch],
        [rollout.group for rollout in batch],
        [rollout.included for rollout in batch],
        aggregation,
        constant=CONSTANT,
    )


def mean(numbers: list[float]) -> float:
    return fmean(numbers) if numbers else 0.0


def aggregated(batch: list[GenerationBatch], aggregation: str) -> float:
    """The loss of the batch, as the aggregation's name states it."""
    counted = [rollout for rollout in batch if rollout.included]
    if aggregation == "token":
        return mean([loss for rollout in counted for loss in rollout.tokens])
    if aggregation == "turn":
        return mean([mean(turn) for rollout in counted for turn in rollout.losses if turn])
    if aggregation == "trajectory":
        return mean([mean(rollout.tokens) for rollout in counted if rollout.tokens])
    if aggregation == "group":
        groups: dict[int, list[float]] = {}
        for rollout in counted:
            groups.setdefault(rollout.group, []).extend(rollout.tokens)
        return mean([mean(losses) for losses in groups.values() if losses])
    return sum(sum(rollout.tokens) for rollout in counted) / (CONSTANT * max(1, len(batch)))  # as Dr. GRPO, over all


def num_tokens(batch: list[GenerationBatch]) -> int:
    return sum(len(rollout.tokens) for rollout in batch if rollout.included)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(batch=batches)
def test_the_token_mean_of_the_weighted_loss_is_the_aggregation(aggregation: str, batch: list[GenerationBatch]) -> None:
    weights = weights_of(batch, aggregation)
    total = sum(
        weight * loss
        for rollout, row in zip(batch, weights, strict=True)
        for turn, weight in zip(rollout.losses, row, strict=True)
        for loss in turn
    )
    expected = aggregated(batch, aggregation)
    assert total / max(1, num_tokens(batch)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(batch=batches)
def test_weights_of_tokens_add_up_to_their_number(aggregation: str, batch: list[GenerationBatch]) -> None:
    weights = weights_of(batch, aggregation)
    for rollout, row in zip(batch, weights, strict=True):
        assert [weight > 0 for weight in row] == [bool(turn) and rollout.included for turn in rollout.losses]
    total = sum(
        weight * len(turn)
        for rollout, row in zip(batch, weights, strict=True)
        for turn, weight in zip(rollout.losses, row, strict=True)
    )
    if aggregation != "constant":
        assert total == pytest.approx(num_tokens(batch))
    if aggregation == "token":
        assert {weight for row in weights for weight in row} <= {0.0, 1.0}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_parts_of_a_batch_need_the_whole_of_it(aggregation: str) -> None:
    """Shuffled rollouts keep their weights, so that ranks may each take their own."""
    batch = [
        GenerationBatch(losses=[[1.0], [2.0, 3.0]], group=0, included=True),
        GenerationBatch(losses=[[4.0]], group=0, included=True),
        GenerationBatch(losses=[[5.0] * 4, [], [6.0]], group=1, included=True),
        GenerationBatch(losses=[[7.0] * 9], group=1, included=False),
    ]
    weights = weights_of(batch, aggregation)
    assert weights_of(batch[::-1], aggregation)[::-1] == weights
    if aggregation != "constant":
        assert weights_of(batch[:3], aggregation) == weights[:3]  # what does not count changes nothing


def test_aggregations_by_hand() -> None:
    counts = [[1, 3], [2]]
    by_hand = {
        "token": [[1.0, 1.0], [1.0]],
        "turn": [[2.0, 2 / 3], [1.0]],  # 6 tokens / (3 turns · tokens)
        "trajectory": [[3 / 4, 3 / 4], [3 / 2]],
        "group": [[3 / 4, 3 / 4], [3 / 2]],  # each rollout is a group
        "constant": [[3 / 7, 3 / 7], [3 / 7]],
    }
    for aggregation, expected in by_hand.items():
        weights = aggregation_weights(counts, [0, 1], [True, True], aggregation, constant=7)
        assert [pytest.approx(row) for row in expected] == weights


def test_a_constant_weighs_a_token_alike_however_many_are_left_out() -> None:
    """A token's part of the loss is its weight over the number of tokens that count."""
    for counts in ([True, True, True], [True, False, False]):
        [[weight], *_] = aggregation_weights([[2], [3], [4]], [0, 0, 1], counts, "constant", constant=5)
        num_counted = sum(size for size, is_counted in zip((2, 3, 4), counts, strict=True) if is_counted)
        assert weight / num_counted == pytest.approx(1 / (3 * 5))


def test_what_cannot_be_aggregated_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_aggregation cannot be 'trajektory'; did you mean 'trajectory'"):
        aggregation_weights([[1]], [0], [True], "trajektory")
    for constant in (None, 0):
        with pytest.raises(ConfigError, match=f"requires a positive number of tokens, got {constant}"):
            aggregation_weights([[1]], [0], [True], "constant", constant=constant)
    for groups, counts in (([], [True]), ([0], [])):
        with pytest.raises(ValueError, match="each of 1 rollouts needs a group and a flag"):
            aggregation_weights([[1]], groups, counts, "token")


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=5))
def test_invalid_turns_are_masked_alone_or_with_their_rollout(invalid: list[list[bool]]) -> None:
    keep, mask, mask_rollout = (invalid_turn_weights(invalid, mode) for mode in INVALID_TURN_MODES)
    for i, flags in enumerate(invalid):
        assert keep[i] == [1.0] * len(flags)
        assert mask[i] == [0.0 if flag else 1.0 for flag in flags]
        assert mask_rollout[i] == [0.0 if True in flags else 1.0] * len(flags)


def test_an_unknown_treatment_of_invalid_turns_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="invalid_turns cannot be 'drop'; valid names: 'keep', 'mask', 'mask_rollout'"
    ):
        invalid_turn_weights([[True]], "drop")


def test_masking_invalid_rollouts_is_the_gradient_of_their_being_worth_the_baseline() -> None:
    """One turn, three actions of which the last is invalid, softmax policy: what each mode follows in expectation."""
    probabilities, rewards, invalid, baseline = [0.5, 0.2, 0.3], [1.0, 3.0, -2.0], [False, False, True], 0.4
    advantages = [[reward - baseline] for reward in rewards]

    def followed(mode: str) -> list[float]:
        weights = invalid_turn_weights([[flag] for flag in invalid], mode)
        weighed = [[row[0] * weight[0]] for row, weight in zip(advantages, weights, strict=True)]
        return [  # Σ_a p(a)·A(a)·∂log p(a)/∂logit(j)
            sum(
                p * row[0] * ((a == j) - probabilities[j])
                for a, (p, row) in enumerate(zip(probabilities, weighed, strict=True))
            )
            for j in range(3)
        ]

    def gradient(earned: list[float]) -> list[float]:
        expected = sum(p * r for p, r in zip(probabilities, earned, strict=True))
        return [p * (r - expected) for p, r in zip(probabilities, earned, strict=True)]

    assert followed("keep") == pytest.approx(gradient(rewards))
    assert followed("mask_rollout") == pytest.approx(gradient([1.0, 3.0, baseline]))


amounts = st.floats(-10, 10)
non_negative = st.floats(0, 10)
turns = st.lists(st.tuples(amounts | st.lists(amounts, max_size=3), non_negative, non_negative), max_size=4)


@given(ratio=st.floats(0, 5), advantage=amounts, weight=non_negative)
def test_a_weight_passes_through_the_clip(ratio: float, advantage: float, weight: float) -> None:
    def loss(amount: float) -> float:
        return -min(ratio * amount, min(max(ratio, 0.8), 1.2) * amount)

    assert loss(weight * advantage) == pytest.approx(weight * loss(advantage), rel=1e-9, abs=1e-9)
