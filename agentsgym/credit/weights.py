"""Compute non-negative weights, one a turn, that are multiplied into the turn's advantages.

**Why that is exact.** For ``w ≥ 0`` and numbers x, y, ``min(w·x, w·y) = w·min(x, y)``. So for a token with the ratio r
and the advantage A::

    min(r·wA, clip(r)·wA) = w·min(r·A, clip(r)·A)

whichever the sign of A, inside the clip and outside of it, and ``A → wA`` is the loss of the token times w: under
``grpo``, ``bnpo``, ``dr_grpo``, ``dapo`` and ``luspo``, with the two-sided clip of ``delta`` too, and with a sequence's
ratio in place of the token's (GSPO). The loss of ``cispo`` is linear in A; that of ``sapo`` is linear in A on each side
of 0, and ``w > 0`` keeps its side, while at ``w = 0`` both sides give 0. That of ``vespo`` is linear in A except that
the sign of the row's sum of wA chooses its weight of the row.

**What cannot be folded.** The KL and entropy terms, which contain no advantage: they keep the loss's own weights. A
change of the ratio *inside* the clip, which moves the edge: GSPO itself. And a denominator that is a sum over the
batch: weights redistribute only the numerator. So :func:`aggregation_weights` are relative to the token mean and
become the aggregation they are named after under a loss that divides by the number of agent tokens of the whole batch
(``dapo``, ``cispo``, ``vespo``), not under one that divides by a row's tokens, a number of rows or the tokens of a
micro-batch as well. A token of weight 0 counts in those denominators, and in TRL's clip metrics as not clipped.

**Sums.** ``constant`` divides by all rollouts, so that a token weighs the same however many were left out. The
weights of all tokens add up to the number of agent tokens (``constant`` aside), so that a batch has the same weight
whichever is chosen. ``token`` and ``constant`` keep the direction of the gradient; under the others a token weighs less
the more tokens its turn, rollout or group has, which depends on what the policy sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from agentsgym.credit._comparison import check_choice
from agentsgym.errors import ConfigError

# How much of (task group, rollout, turn) names the unit: units weigh alike, and so do the tokens within a unit.
_UNIT_DEPTHS: Final[Mapping[str, int]] = {"token": 0, "group": 1, "trajectory": 2, "turn": 3}

AGGREGATIONS: Final = (*_UNIT_DEPTHS, "constant")
INVALID_TURN_MODES: Final = ("keep", "mask", "mask_rollout")


def aggregation_weights(
    token_counts: Sequence[Sequence[int]],
    groups: Sequence[int],
    included: Sequence[bool],
    aggregation: str,
    *,
    constant: int | None = None,
) -> list[list[float]]:
    """Weigh each turn's tokens so that the mean over all N agent tokens, ``w/N`` each, becomes another mean.

    ==============  ==========================================================  ==================================
    aggregation     a token's part of the loss                                  what weighs alike
    ==============  ==========================================================  ==================================
    ``token``       1 / N                                                       all tokens (DAPO, 2503.14476)
    ``turn``        1 / (number of turns · tokens of the turn)                  all turns
    ``trajectory``  1 / (number of rollouts · tokens of the rollout)            all rollouts (GRPO, 2402.03300)
    ``group``       1 / (number of task groups · tokens of the group)           all tasks
    ``constant``    1 / (number of rollouts · ``constant``)                     all tokens (Dr. GRPO, 2503.20783)
    ==============  ==========================================================  ==================================

    Args:
        token_counts: Agent tokens of each turn of each rollout, over all ranks; units without any do not count.
        groups: The task group of each rollout.
        included: Whether each is trained on; one that is not gets weights of 0 and does not count.
        aggregation: One of :data:`AGGREGATIONS`.
        constant: The divisor of a rollout's sum under ``"constant"``; the others do not use it.

    Returns:
        One weight a turn of each rollout, 0.0 without tokens.

    Raises:
        ConfigError: ``aggregation`` is unknown, or ``"constant"`` comes without a positive ``constant``.
        ValueError: ``groups`` or ``included`` does not have one entry a rollout.

    >>> aggregation_weights([[2, 4], [2]], groups=[0, 0], included=[True, True], aggregation="trajectory")
    [[0.6666666666666666, 0.6666666666666666], [2.0]]
    """
    check_choice("loss_aggregation", aggregation, AGGREGATIONS)
    if not len(token_counts) == len(groups) == len(included):
        raise ValueError(
            f"each of {len(token_counts)} rollouts needs a group and a flag, got {len(groups)} and {len(included)}"
        )
    counted = [list(row) if keep else [0] * len(row) for row, keep in zip(token_counts, included, strict=True)]
    if aggregation == "constant":
        if constant is None or constant < 1:
            raise ConfigError(f"loss_aggregation 'constant' needs a positive number of tokens, got {constant!r}")
        weight = sum(map(sum, counted)) / (max(1, len(included)) * constant)
        return [[weight if size else 0.0 for size in row] for row in counted]
    # N / (number of units that have tokens · tokens of the unit), for each turn that has tokens.
    depth = _UNIT_DEPTHS[aggregation]
    units = [[(groups[i], i, k)[:depth] for k in range(len(row))] for i, row in enumerate(counted)]
    sizes: Counter[tuple[int, ...]] = Counter()
    for own, row in zip(units, counted, strict=True):
        for unit, size in zip(own, row, strict=True):
            if size:
                sizes[unit] += size
    total = sizes.total()
    return [
        [total / (len(sizes) * sizes[unit]) if size else 0.0 for unit, size in zip(own, row, strict=True)]
        for own, row in zip(units, counted, strict=True)
    ]


def invalid_turn_weights(invalid: Sequence[Sequence[bool]], mode: str) -> list[list[float]]:
    """Leave turns with an invalid action out of the loss, or the whole rollouts that hold one.

    * ``"keep"`` changes nothing: an invalid turn is trained on with its advantage, as any other.
    * ``"mask"`` gives the invalid turns themselves 0. Whether an action is valid depends on the action, so that the
      rest is in general not the gradient of any objective: the policy is not trained to avoid invalid actions, and
      only its other turns get the credit for them.
    * ``"mask_rollout"`` gives 0 to every turn of a rollout with an invalid turn (the void-turn filter of SimpleTIR,
      2509.02479). In the resulting objective such a rollout is worth its baseline, whatever its reward: a bad one is
      not punished, and one that recovered is not rewarded.

    Both masks change the objective; they stabilize training where invalid turns contain text that the policy rarely
    samples. Masked turns stay in the baselines.

    Args:
        invalid: Whether the turn's action was invalid, for each turn of each rollout.
        mode: One of :data:`INVALID_TURN_MODES`.

    Returns:
        0.0 or 1.0 for each turn of each rollout.

    Raises:
        ConfigError: ``mode`` is unknown.

    >>> invalid_turn_weights([[False, True], [False]], "mask_rollout")
    [[0.0, 0.0], [1.0]]
    """
    check_choice("invalid_turns", mode, INVALID_TURN_MODES)
    if mode == "keep":
        return [[1.0] * len(flags) for flags in invalid]
    if mode == "mask_rollout":
        return [[float(not any(flags))] * len(flags) for flags in invalid]
    return [[float(not flag) for flag in flags] for flags in invalid]
