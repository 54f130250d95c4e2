"""Compute the log-probabilities for the loss of a batch, and compare the sampler's with the model's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch

from agentsgym.training.tensors.importance import (
    ImportanceCorrection,
    LogprobGapSums,
    cut_tokens,
    importance_sampling_ratio,
    row_log_ratios,
)

KnownLogprobs = Literal["all", "some", "none"]
"""Whether all, some or none of a rollout's agent tokens have a log-probability from the sampler."""

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(ids, attention mask, mask of the tokens to score), each (B, L) → log-probabilities and entropies, each (B, L), 0.0
elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log-probabilities for the loss of a batch, and the importance weights that follow from them.

    Attributes:
        old: (B, L), the old log-probabilities, the denominator of the policy ratio; None if TRL uses the detached
            current ones.
        reference: (B, L), log-probabilities of the reference model; None without a KL term.
        sampling: (B, L), log-probabilities from the sampler; None if the loss does not use them.
        importance_ratio: (B, L), the weights that correct for the sampler; None without a correction.
        comparison: The differences between sampler and model; None if they were not compared.
        model: (B, L), log-probabilities of the model being trained; None if they were not computed.
        entropies: (B, L), entropies of the same model's distributions, in nats; None if they were not computed.
    """

    old: torch.Tensor | None
    reference: torch.Tensor | None
    sampling: torch.Tensor | None
    importance_ratio: torch.Tensor | None
    comparison: LogprobGapSums | None
    model: torch.Tensor | None = None
    entropies: torch.Tensor | None = None


def token_logprobs(  # noqa: PLR0913  # what the decision depends on
    mask: torch.Tensor,
    recorded: torch.Tensor | None,
    known: Collection[KnownLogprobs],
    score: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    correction: ImportanceCorrection | None,
    needs_old: bool,
    needs_sampling: bool,
    is_trained_policy: bool,
    compares: bool,
) -> TokenLogprobs:
    """Compute only what the loss needs; the caller adds the reference log-probabilities.

    Sampling with transformers uses the weights that are being trained, so the sampler's log-probabilities serve as the
    old ones if the loss needs any. vLLM has separate weights and kernels: with vLLM, or with any importance correction,
    the old log-probabilities are recomputed with the trained model, and the sampler's only enter the importance ratio.

    Args:
        mask: (B, L), 1 on the agent tokens that are trained on.
        recorded: (B, L), log-probabilities from the sampler; None if it returned none.
        known: The values of :data:`KnownLogprobs` for the rollouts of all ranks, so that all ranks decide alike.
        score: Scores the batch with the model that is being trained, as :data:`Score` does.
        correction: The importance correction for the sampler; None if it is off.
        needs_old: Whether updates use rollouts from earlier weights.
        needs_sampling: Whether the loss itself uses the sampler's log-probabilities.
        is_trained_policy: Whether the sampler used exactly the weights that are being trained.
        compares: Whether to compare the sampler's log-probabilities with the model's, even if the loss does not need
            the model's.
    """
    recorded = None if "none" in known else recorded
    needs_old = needs_old or correction is not None
    model_is_old = correction is not None or not (set(known) == {"all"} and is_trained_policy)
    is_scored = (needs_old and model_is_old) or (compares and "none" not in known)
    model, entropies = score() if is_scored else (None, None)
    ratio = comparison = None
    if model is not None and correction is not None:
        ratio = importance_sampling_ratio(model, model if recorded is None else recorded, mask, correction)
    if model is not None and recorded is not None:
        comparison = LogprobGapSums.of(
            recorded,
            model,
            mask,
            row_log_ratios=row_log_ratios(model - recorded, mask),
            num_cut=None if correction is None else int(cut_tokens(model, recorded, mask, correction).sum()),
        )
    return TokenLogprobs(
        old=(model if model_is_old else recorded) if needs_old else None,
        reference=None,
        sampling=recorded if needs_sampling else None,
        importance_ratio=ratio,
        comparison=comparison,
        model=model,
        entropies=entropies,
    )
