"""Weight tokens by the ratio of the trained model's probability to the sampler's, and measure the correction's cost.

Let ``d_t = log p_t - log q_t`` for an agent token, where p is its probability under the trained model, at the weights
it was sampled with, and q the probability that the sampler reported. A mode combines the level of the ratio with the
treatment of ratios outside the bounds::

    token_*      exp(d_t)              one ratio per token; biased, with small variance
    sequence_*   exp(Σ_t d_t)          one ratio per row; unbiased, with a variance exponential in the number of tokens
    geometric_*  exp(mean_t d_t)       one ratio per row; not an importance weight; does not grow with length
    *_truncate   ratios outside the bounds are set to the nearest bound
    *_mask       tokens with ratios outside the bounds are excluded from the loss

The weights are non-negative, so they may be multiplied into advantages (:mod:`agentsgym.credit.weights` shows why).
This gives the same loss as TRL's own correction (except for ``vespo``, whose weights they would alter), so they must
not also be passed to TRL.

**Rows.** The unit of the sequence and geometric levels is a *row*. In the turn layout, a row is one turn or a few: its
ratio covers only its own agent tokens, and not those of the rollout's other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

# The default bounds of each mode: TRL's for a sequence ratio, closer to 1 for a token ratio, and even closer for a mean
# over a row, in which the noise of single tokens cancels.
CORRECTIONS: Final[Mapping[str, tuple[float | None, float | None]]] = {
    "token_truncate": (None, 2.0),
    "token_mask": (0.5, 2.0),
    "sequence_truncate": (None, 3.0),
    "sequence_mask": (None, 3.0),
    "geometric_mask": (0.99, 1.01),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceCorrection:
    """The importance weights that correct for the sampler.

    Attributes:
        mode: One of :data:`CORRECTIONS`.
        clip_min: Lower bound of the ratio; None for no bound.
        clip_max: Upper bound of the ratio; None for no bound.

    Raises:
        ConfigError: The mode is unknown.
    """

    mode: str
    clip_min: float | None
    clip_max: float | None

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound, infinite for no bound."""
        low = -math.inf if self.clip_min is None else self.clip_min
        return low, math.inf if self.clip_max is None else self.clip_max


def importance_sampling_ratio(
    old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, correction: ImportanceCorrection
) -> torch.Tensor:
    """Weight each token by the ratio of its probability under the trained model to that under the sampler.

    The token and sequence modes give exactly TRL's values. ``geometric_mask`` does not weight tokens: a row whose
    geometric mean ratio lies within the bounds is kept unchanged (1), and any other row is excluded (0).

    For many turns, ``token_truncate`` is recommended. A sequence ratio multiplies the small numerical differences of
    all tokens of a row, so a few rows would dominate a batch of long episodes.

    Args:
        old: (B, T), log-probabilities under the trained model, at the weights that the tokens were sampled with.
        sampling: (B, T), log-probabilities from the sampler; NaN where unknown, which is treated as no difference.
        mask: (B, T), 1 on agent tokens.
        correction: The mode and its bounds.

    Returns:
        (B, T), non-negative. In the sequence and geometric modes, all tokens of a row have the same weight; in the
        token modes, tokens outside the mask have the weight of a ratio of 1.
    """
    ratio, (low, high) = _ratio(old, sampling, mask, correction.mode), correction.bounds
    if correction.mode.endswith("truncate"):
        return ratio.clamp(low, high)
    kept = torch.ones_like(ratio) if correction.mode.startswith("geometric") else ratio
    return kept.masked_fill((ratio < low) | (ratio > high), 0.0)


def cut_tokens(
    old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, correction: ImportanceCorrection
) -> torch.Tensor:
    """Mark the agent tokens that :func:`importance_sampling_ratio` masks or clips to a bound.

    Their fraction of all agent tokens is the part of the batch for which the correction is not exact. The arguments are
    those of :func:`importance_sampling_ratio`.

    Returns:
        (B, T), boolean: True where the mask is 1 and the ratio lies strictly outside the bounds.
    """
    ratio, (low, high) = _ratio(old, sampling, mask, correction.mode), correction.bounds
    return mask.bool() & ((ratio < low) | (ratio > high))


def row_log_ratios(log_ratio: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """The logarithm of each row's sequence ratio, ``Σ_t d_t`` over its agent tokens.

    The result is small enough to gather from all ranks for :func:`effective_sample_size`.

    Args:
        log_ratio: (B, T), differences of log-probabilities; NaN is treated as no difference.
        mask: (B, T), 1 on agent tokens.

    Returns:
        One number for each row with agent tokens, in order.
    """
    sums = _difference(log_ratio, mask).sum(-1)
    return sums[mask.bool().any(-1)].tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def effective_sample_size(log_ratios: Sequence[float]) -> float:
    """Compute the effective sample size as a fraction of N rows, ``(Σ w)² / (N·Σ w²)`` with ``w = exp`` of each.

    Kong (1992), divided by N. It is 1 if all weights are equal, and 1/N if one row outweighs all others. Shifting all
    logarithms does not change it, so the largest is subtracted first to avoid overflow.

    Args:
        log_ratios: Logarithms of the weights of the rows of all ranks, (N,).

    Returns:
        A number in [1/N, 1]; 1.0 if there are no rows.

    >>> effective_sample_size([0.0, 0.0, -1000.0, -1000.0])
    0.5
    """
    if not log_ratios:
        return 1.0
    largest = max(log_ratios)
    weights = [math.exp(number - largest) for number in log_ratios]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight**2 for weight in weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGapSums:
    """Sums over the compared tokens of one rank, from which :func:`gap_metrics` computes the metrics over all ranks.

    Attributes:
        num_tokens: Number of agent tokens of the batch, including those without a log-probability from the sampler.
        num_compared: Number of agent tokens that were compared.
        gap: Sum of the absolute differences of log-probabilities.
        largest_gap: The largest absolute difference; 0 without tokens.
        log_ratio: Sum of ``log(p/q)``.
        k3: Sum of ``p/q − 1 − log(p/q)``.
        ratio: Sum of the ratios p/q.
        ratio_squared: Sum of the squared ratios.
        ratio_min: The smallest ratio; infinite without tokens.
        ratio_max: The largest ratio; 0 without tokens.
        row_log_ratios: The logarithm of each row's sequence ratio.
        num_cut: Number of tokens that a correction masks or clips to a bound; None without a correction.
    """

    num_tokens: int
    num_compared: int
    gap: float
    largest_gap: float
    log_ratio: float
    k3: float
    ratio: float
    ratio_squared: float
    ratio_min: float
    ratio_max: float
    row_log_ratios: Sequence[float] = ()
    num_cut: int | None = None

    @classmethod
    def of(
        cls,
        recorded: torch.Tensor,
        recomputed: torch.Tensor,
        mask: torch.Tensor,
        *,
        row_log_ratios: Sequence[float] = (),
        num_cut: int | None = None,
    ) -> Self:
        """Sum over the tokens that are marked.

        Args:
            recorded: (B, L), log-probabilities from the sampler; NaN where unknown, and those tokens are skipped.
            recomputed: (B, L), log-probabilities under the model, at the same temperature.
            mask: (B, L), 1 on agent tokens.
            row_log_ratios: See the attribute.
            num_cut: See the attribute.
        """
        chosen = mask.bool() & ~recorded.isnan()
        log_ratio = recomputed[chosen].double() - recorded[chosen].double()  # (N,), double: ratios may be large
        gap, ratio = log_ratio.abs(), log_ratio.exp()
        is_empty = not len(log_ratio)
        return cls(
            num_tokens=int(mask.sum()),
            num_compared=len(log_ratio),
            gap=gap.sum().item(),
            largest_gap=0.0 if is_empty else gap.max().item(),
            log_ratio=log_ratio.sum().item(),
            k3=(log_ratio.expm1() - log_ratio).sum().item(),
            ratio=ratio.sum().item(),
            ratio_squared=ratio.square().sum().item(),
            ratio_min=math.inf if is_empty else ratio.min().item(),
            ratio_max=0.0 if is_empty else ratio.max().item(),
            row_log_ratios=row_log_ratios,
            num_cut=num_cut,
        )


def gap_metrics(ranks: Sequence[LogprobGapSums]) -> dict[str, float]:
    """Compute the logged metrics of the gap between sampler and model, and of what a correction for it costs.

    Without any token, the gap and KL are 0 and the ratio is 1, so that the names are always the same.

    Returns:
        The metrics of the differences over the tokens of all ranks, with TRL's names, but of unclipped ratios;
        ``sampling/effective_sample_size`` over the rows of all ranks, ``sampling/effective_sample_size_of_tokens`` over
        their agent tokens, and with a correction ``sampling/cut_fraction``, the fraction of agent tokens that it masks
        or clips to a bound.
    """
    num_tokens = sum(rank.num_compared for rank in ranks)
    divisor = max(1, num_tokens)
    ratios, squares = sum(rank.ratio for rank in ranks), sum(rank.ratio_squared for rank in ranks) * num_tokens
    log_ratios = [log_ratio for rank in ranks for log_ratio in rank.row_log_ratios]
    metrics = {
        "sampling/sampling_logp_difference/mean": sum(rank.gap for rank in ranks) / divisor,
        "sampling/sampling_logp_difference/max": max(rank.largest_gap for rank in ranks),
        "sampling/importance_sampling_ratio/min": min(rank.ratio_min for rank in ranks) if num_tokens else 1.0,
        "sampling/importance_sampling_ratio/mean": ratios / divisor if num_tokens else 1.0,
        "sampling/importance_sampling_ratio/max": max(rank.ratio_max for rank in ranks) if num_tokens else 1.0,
        "sampling/kl/k1": -sum(rank.log_ratio for rank in ranks) / divisor if num_tokens else 0.0,
        "sampling/kl/k3": sum(rank.k3 for rank in ranks) / divisor,
        "sampling/effective_sample_size": effective_sample_size(log_ratios),
        "sampling/effective_sample_size_of_tokens": ratios**2 / squares if squares else 1.0,
    }
    cut = [rank.num_cut for rank in ranks if rank.num_cut is not None]
    if cut:
        metrics["sampling/cut_fraction"] = sum(cut) / max(1, sum(rank.num_tokens for rank in ranks))
    return metrics


def _ratio(old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    difference = _difference(old - sampling, mask)
    if mode.startswith("token"):
        return difference.exp()
    pooled = difference.sum(-1, keepdim=True)
    if mode.startswith("geometric"):
        pooled = pooled / mask.sum(-1, keepdim=True).clamp(min=1)
    return pooled.exp().expand_as(difference)


def _difference(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (log_ratio * mask).nan_to_num(nan=0.0)
