"""Weigh tokens by how the sampler differs from the model that is trained, and measure what that costs.

With ``d_t = log p_t - log q_t`` of an agent token, p the model's probability at the weights that sampled and q the
sampler's, a mode has a level, at which the ratio is taken, and a treatment of ratios outside the bounds::

    token_*      exp(d_t)              each token its own; biased, of small variance
    sequence_*   exp(Σ_t d_t)          of the whole row; unbiased, its variance grows exponentially with the tokens
    geometric_*  exp(mean_t d_t)       of the whole row; no importance weight; does not grow with length
    *_truncate   is set to the bound
    *_mask       takes its tokens out of the loss

The weights are non-negative, so they may be multiplied into advantages (:mod:`agentsgym.credit.weights` shows why).
The result is the loss that TRL computes with them (except ``vespo``, whose own weights they change), so they must not
be passed to TRL as well.

**Rows.** The sequence and geometric levels are of a *row*. In the turn layout a row is one turn, or a few: its ratio
holds its own agent tokens and not those of the rollout's other rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch

from agentsgym.errors import ConfigError

# Each mode with its default bounds: TRL's own for a sequence's ratio, closer to 1 for a token's, and closer still for a
# mean over a row, in which the noise of single tokens cancels.
CORRECTIONS: Final[Mapping[str, tuple[float | None, float | None]]] = {
    "token_truncate": (None, 2.0),
    "token_mask": (0.5, 2.0),
    "sequence_truncate": (None, 3.0),
    "sequence_mask": (None, 3.0),
    "geometric_mask": (0.99, 1.01),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceCorrection:
    """The weight by which tokens are corrected for the sampler.

    Attributes:
        mode: One of :data:`CORRECTIONS`.
        clip_min: Lower bound of the ratio; None for none.
        clip_max: Upper bound; None for none.

    Raises:
        ConfigError: There is no such mode.
    """

    mode: str
    clip_min: float | None
    clip_max: float | None

    def __post_init__(self) -> None:
        if self.mode not in CORRECTIONS:
            raise ConfigError(
                f"the importance sampling mode must be one of {', '.join(CORRECTIONS)}, got {self.mode!r}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound, infinite where there is none."""
        low = -math.inf if self.clip_min is None else self.clip_min
        return low, math.inf if self.clip_max is None else self.clip_max


def importance_sampling_ratio(
    old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, correction: ImportanceCorrection
) -> torch.Tensor:
    """Weigh each token by how much likelier the trained model makes it than the engine that sampled it.

    The token and sequence modes are TRL's, number by number. ``geometric_mask`` does not weigh: a row whose
    geometric mean ratio lies within the bounds is kept as it is (1), any other is left out (0).

    Over many turns ``token_truncate`` is recommended. A sequence ratio multiplies the small numerical differences of
    the whole row, so that long episodes are masked or all end at the bound.

    Args:
        old: (B, T), log-probabilities by the trained model, at the weights that sampled.
        sampling: (B, T), by the engine; NaN where it is not known, which counts as no difference.
        mask: (B, T), 1 on agent tokens.
        correction: The mode and its bounds.

    Returns:
        (B, T), non-negative; in the sequence and geometric modes each row holds one number, in the token modes it is
        that of the ratio 1 off the mask.
    """
    ratio, (low, high) = _ratio(old, sampling, mask, correction.mode), correction.bounds
    if correction.mode.endswith("truncate"):
        return ratio.clamp(low, high)
    kept = torch.ones_like(ratio) if correction.mode.startswith("geometric") else ratio
    return kept.masked_fill((ratio < low) | (ratio > high), 0.0)


def cut_tokens(
    old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor, correction: ImportanceCorrection
) -> torch.Tensor:
    """Mark the agent tokens that :func:`importance_sampling_ratio` takes out or sets to a bound.

    Their fraction of all agent tokens is the part of the batch for which the correction is not exact.

    Args:
        old: (B, T), as for :func:`importance_sampling_ratio`.
        sampling: (B, T), likewise.
        mask: (B, T), 1 on agent tokens.
        correction: The mode and its bounds.

    Returns:
        (B, T), boolean: whether the ratio lies outside the bounds (one on the bound does not), False off the mask.
    """
    ratio, (low, high) = _ratio(old, sampling, mask, correction.mode), correction.bounds
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
    """Compute the effective sample size as a fraction of N rows, ``(Σ w)² / (N·Σ w²)`` with ``w = exp`` of each.

    Kong (1992), divided by N. It is 1 where all weights are equal and 1/N where one row outweighs all others. A shift
    of all logarithms does not change it, so the largest is subtracted first and no weight overflows.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGapSums:
    """Sums over the compared tokens of one rank, from which :func:`gap_metrics` makes those of all ranks.

    Attributes:
        num_tokens: Agent tokens of the batch, also those that the sampler could not score.
        num_compared: Those that were compared.
        gap: Sum of the absolute differences of log-probabilities.
        largest_gap: The largest; 0 without tokens.
        log_ratio: Sum of ``log(p/q)``.
        k3: Sum of ``p/q − 1 − log(p/q)``.
        ratio: Sum of the ratios p/q.
        ratio_squared: Sum of their squares.
        ratio_min: The smallest; infinite without tokens.
        ratio_max: The largest; 0 without tokens.
        row_log_ratios: The logarithm of each row's sequence ratio.
        num_cut: Tokens that a correction takes out or sets to a bound; None without correction.
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
        """Sum up the tokens that are marked.

        Args:
            recorded: (B, L), the sampler's; tokens that it could not score hold NaN and are left out.
            recomputed: (B, L), the model's at the same temperature.
            mask: (B, L), 1 on agent tokens.
            row_log_ratios: As the attribute.
            num_cut: As the attribute.
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
    """Summarize for the log how far the sampler is from the model, and what a correction for it costs.

    Args:
        ranks: The sums of every rank.

    Returns:
        What :func:`agentsgym.training.drift.drift_metrics` returns, ``sampling/effective_sample_size`` over the rows
        of all ranks, ``sampling/effective_sample_size_of_tokens`` over their agent tokens, and with a correction
        ``sampling/cut_fraction``, the fraction of agent tokens that it takes out or
        sets to a bound.
    """
    log_ratios = [log_ratio for rank in ranks for log_ratio in rank.row_log_ratios]
    metrics = difference_metrics(ranks) | {"sampling/effective_sample_size": effective_sample_size(log_ratios)}
    squares = sum(rank.ratio_squared for rank in ranks) * sum(rank.num_compared for rank in ranks)
    metrics["sampling/effective_sample_size_of_tokens"] = (
        sum(rank.ratio for rank in ranks) ** 2 / squares if squares else 1.0
    )
    cut = [rank.num_cut for rank in ranks if rank.num_cut is not None]
    if cut:
        metrics["sampling/cut_fraction"] = sum(cut) / max(1, sum(rank.num_tokens for rank in ranks))
    return metrics


def difference_metrics(ranks: Sequence[LogprobGapSums]) -> dict[str, float]:
    """Summarize the differences alone, over the tokens of all ranks."""
    num_tokens = sum(rank.num_compared for rank in ranks)
    divisor = max(1, num_tokens)
    return {
        "sampling/sampling_logp_difference/mean": sum(rank.gap for rank in ranks) / divisor,
        "sampling/sampling_logp_difference/max": max(rank.largest_gap for rank in ranks),
        "sampling/importance_sampling_ratio/min": min(rank.ratio_min for rank in ranks) if num_tokens else 1.0,
        "sampling/importance_sampling_ratio/mean": sum(rank.ratio for rank in ranks) / divisor if num_tokens else 1.0,
        "sampling/importance_sampling_ratio/max": max(rank.ratio_max for rank in ranks) if num_tokens else 1.0,
        "sampling/kl/k1": -sum(rank.log_ratio for rank in ranks) / divisor if num_tokens else 0.0,
        "sampling/kl/k3": sum(rank.k3 for rank in ranks) / divisor,
    }


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
