"""What the loss is weighed with where the sampler is not quite the model that is trained, and what that costs.

With ``d_t = log p_t - log q_t`` of an agent token, p the model's probability at the weights that sampled and q the
sampler's, a mode has a level, at which the ratio is taken, and says what becomes of a ratio outside the bounds::

    token_*      exp(d_t)              each token its own; biased, of small variance
    sequence_*   exp(Σ_t d_t)          of the whole row; unbiased, its variance grows exponentially with the tokens
    geometric_*  exp(mean_t d_t)       of the whole row; no importance weight, but a measure that no length blows up
    *_truncate   is set to the bound
    *_mask       takes its tokens out of the loss

The weights are non-negative, so they may be multiplied into advantages (:mod:`agentsgym.credit.weights` shows why).
That is the very loss that TRL computes when it is given them (``vespo`` aside, where they change its own weights), so
they must not be given to it as well.

**Rows.** The sequence and geometric levels are of a *row*. In the turn layout a row is one turn, or a few: its ratio
holds its own agent tokens and not those of the rollout's other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from agentsgym.errors import ConfigError

# Each mode with its bounds where nobody sets others: TRL's own for a sequence's ratio, closer to 1 for a token's, and
# closer still for a mean over a row, in which the noise of single tokens cancels.
CORRECTIONS: Final[Mapping[str, tuple[float | None, float | None]]] = {
    "token_truncate": (None, 2.0),
    "token_mask": (0.5, 2.0),
    "sequence_truncate": (None, 3.0),
    "sequence_mask": (None, 3.0),
    "geometric_mask": (0.99, 1.01),
}


def importance_sampling_ratio(
    old: torch.Tensor,
    sampling: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """Weigh each token by how much likelier the trained model makes it than the engine that sampled it.

    The token and sequence modes are TRL's, number by number. ``geometric_mask`` weighs nothing: a row whose geometric
    mean ratio lies within the bounds is kept as it is (1), another, which is off as a whole, is left out (0).

    Over many turns ``token_truncate`` is the one to take. A sequence ratio multiplies the small numerical differences
    of the whole row, so that long episodes are masked away or all sit at the clip.

    Args:
        old: (B, T), log-probabilities by the trained model, at the weights that sampled.
        sampling: (B, T), by the engine; NaN where it could not tell, which counts as no difference.
        mask: (B, T), 1 on agent tokens.
        mode: One of :data:`CORRECTIONS`.
        clip_min: None for no lower bound.
        clip_max: None for no upper bound.

    Returns:
        (B, T), non-negative; in the sequence and geometric modes each row holds one number, in the token modes it is
        that of the ratio 1 off the mask.

    Raises:
        ConfigError: There is no such mode.
    """
    ratio = _ratio(old, sampling, mask, mode)
    low, high = _bounds(clip_min, clip_max)
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    kept = torch.ones_like(ratio) if mode.startswith("geometric") else ratio
    return kept.masked_fill((ratio < low) | (ratio > high), 0.0)


def cut_tokens(
    old: torch.Tensor,
    sampling: torch.Tensor,
    mask: torch.Tensor,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """Tell which agent tokens :func:`importance_sampling_ratio` takes out or sets to a bound.

    Their share of all agent tokens tells how much of the batch the correction is not exact for.

    Args:
        old: As there, and so are the others.
        sampling: (B, T).
        mask: (B, T), 1 on agent tokens.
        mode: One of :data:`CORRECTIONS`.
        clip_min: None for no lower bound.
        clip_max: None for no upper bound.

    Returns:
        (B, T), boolean: whether the ratio lies outside the bounds (one on the bound does not), False off the mask.

    Raises:
        ConfigError: There is no such mode.
    """
    ratio = _ratio(old, sampling, mask, mode)
    low, high = _bounds(clip_min, clip_max)
    return mask.bool() & ((ratio < low) | (ratio > high))


def row_log_ratios(log_ratio: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """The logarithm of each row's sequence ratio, ``Σ_t d_t`` over its agent tokens.

    Small enough to be gathered from all ranks for :func:`effective_sample_size`.

    Args:
        log_ratio: (B, T), differences of log-probabilities; NaN counts as no difference.
        mask: (B, T), 1 on agent tokens.

    Returns:
        One number for each row that has agent tokens, in order.
    """
    sums = _difference(log_ratio, mask).sum(-1)
    return sums[mask.bool().any(-1)].tolist()


def effective_sample_size(log_ratios: Sequence[float]) -> float:
    """The share of rows that as many unweighted ones would be worth, ``(Σ w)² / (N·Σ w²)`` with ``w = exp`` of each.

    Kong (1992), divided by N. It is 1 where all weights are equal and 1/N where one row outweighs all others. A shift
    of all logarithms leaves it as it is, so the largest is taken off first and no weight overflows.

    Args:
        log_ratios: Logarithms of the weights, (N,), of the rows of all ranks.

    Returns:
        In [1/N, 1]; 1.0 where there are none.

    >>> effective_sample_size([0.0, 0.0, -1000.0, -1000.0])
    0.5
    """
    if not log_ratios:
        return 1.0
    largest = max(log_ratios)
    weights = [math.exp(number - largest) for number in log_ratios]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight**2 for weight in weights))


def _ratio(old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    if mode not in CORRECTIONS:
        raise ConfigError(f"an importance sampling mode must be one of {', '.join(CORRECTIONS)}, got {mode!r}")
    difference = _difference(old - sampling, mask)
    if mode.startswith("token"):
        return difference.exp()
    pooled = difference.sum(-1, keepdim=True)
    if mode.startswith("geometric"):
        pooled = pooled / mask.sum(-1, keepdim=True).clamp(min=1)
    return pooled.exp().expand_as(difference)


def _difference(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (log_ratio * mask).nan_to_num(nan=0.0)


def _bounds(clip_min: float | None, clip_max: float | None) -> tuple[float, float]:
    return -math.inf if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
