"""Compute non-negative weights, one per turn, that are multiplied into the turn's advantages.

**Why this is exact.** For ``w ≥ 0`` and numbers x, y, ``min(w·x, w·y) = w·min(x, y)``. So for a token with the ratio r
and the advantage A::

    min(r·wA, clip(r)·wA) = w·min(r·A, clip(r)·A)

for either sign of A, inside and outside the clip range. So replacing A by wA multiplies the token's loss by w. This
holds for ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo`` and ``luspo``, also with the two-sided clip of ``delta`` and with
sequence-level ratios (GSPO). The loss of ``cispo`` is linear in A. The loss of ``sapo`` is linear in A on each side of
0: ``w > 0`` preserves the sign, and for ``w = 0`` the loss is 0. The loss of ``vespo`` is linear in A, except that the
sign of the row's sum of wA selects the weight of the row.

**What weights cannot express.** The KL and entropy terms contain no advantage and keep the weights of the loss. A
change of the ratio *inside* the clip, as in GSPO itself, moves the clip boundary. And weights change only the
numerator, not a denominator that is a sum over the batch. Therefore :func:`aggregation_weights` are relative to the
token mean: they produce the aggregation they are named after with a loss that divides by the number of agent tokens of
the entire batch (``dapo``, ``cispo``, ``vespo``), but not with one that divides by the tokens of a row or of a
micro-batch, or by a number of rows. A token of weight 0 counts in these denominators, and in TRL's clip metrics as not
clipped.

**Sums.** ``constant`` divides by all rollouts, so a token's weight does not depend on how many are excluded. Except
with ``constant``, the weights of all tokens add up to the number of agent tokens, so the total weight of a batch is the
same for each aggregation. ``token`` and ``constant`` preserve the direction of the gradient; with the others, a token
weighs less the more tokens its turn, rollout or group has, which depends on what the policy sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from agentsgym.credit._comparison import check_choice
from agentsgym.errors import ConfigError

# The length of the prefix of (task group, rollout, turn) that identifies a unit; all units have the same total weight.
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
    """Weight each turn's tokens so that the mean over all N agent tokens, ``w/N`` each, becomes another mean.

    ==============  ==========================================================  ==================================
    aggregation     a token's weight in the loss                                equal weight for
    ==============  ==========================================================  ==================================
    ``token``       1 / N                                                       all tokens (DAPO, 2503.14476)
    ``turn``        1 / (number of turns · tokens of the turn)                  all turns
    ``trajectory``  1 / (number of rollouts · tokens of the rollout)            all rollouts (GRPO, 2402.03300)
    ``group``       1 / (number of task groups · tokens of the group)           all tasks
    ``constant``    1 / (number of rollouts · ``constant``)                     all tokens (Dr. GRPO, 2503.20783)
    ==============  ==========================================================  ==================================

    Args:
        token_counts: Agent tokens of each turn of each rollout, over all ranks; units without tokens do not count.
        groups: The task group of each rollout.
        included: Whether each rollout is trained on; the others get weights of 0 and do not count.
        aggregation: One of :data:`AGGREGATIONS`.
        constant: The divisor of a rollout's sum with ``"constant"``; ignored otherwise.

    Returns:
        One weight per turn of each rollout, 0.0 for a turn without tokens.

    Raises:
        ConfigError: ``aggregation`` is unknown, or is ``"constant"`` without a positive ``constant``.
        ValueError: ``groups`` or ``included`` does not have one entry per rollout.

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
            raise ConfigError(f"loss_aggregation 'constant' requires a positive number of tokens, got {constant!r}")
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
    """Compute weights that exclude turns with an invalid action, or all turns of their rollouts, from the loss.

    * ``"keep"`` changes nothing: an invalid turn is trained on with its advantage, like any other.
    * ``"mask"`` gives the invalid turns a weight of 0. Since validity depends on the action, the remaining terms are in
      general not the gradient of any objective: the policy is not trained to avoid invalid actions, and their
      consequences are credited to its other turns.
    * ``"mask_rollout"`` gives every turn of a rollout with an invalid turn a weight of 0 (the void-turn filter of
      SimpleTIR, 2509.02479). In the resulting objective, such a rollout counts as its baseline, whatever its reward:
      bad rollouts are not penalized, and rollouts that recovered are not rewarded.

    Both masks change the objective; they stabilize training if invalid turns contain text that the policy rarely
    samples. Masked turns stay in the baselines.

    Args:
        invalid: Whether the turn's action was invalid, for each turn of each rollout.
        mode: One of :data:`INVALID_TURN_MODES`.

    Returns:
        A weight of 0.0 or 1.0 per turn of each rollout.

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
