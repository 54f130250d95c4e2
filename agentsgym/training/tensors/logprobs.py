"""Compute the log-probabilities for the loss of a batch, and compare the sampler's with the model's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch

from agentsgym.errors import ConfigError
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


class LogprobSettings(Protocol):
    """The settings used here; :class:`~agentsgym.training.config.GRPOEnvConfig` has them."""

    use_vllm: bool
    off_policy_mask_threshold: float | None

    @property
    def importance_correction(self) -> ImportanceCorrection | None:
        """The importance correction for the sampler; None if it is off."""
        ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether updates use rollouts from earlier weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobPlan:
    """The log-probabilities that a batch needs, the same on all ranks.

    Sampling with transformers uses the weights that are being trained, so the sampler's log-probabilities serve as the
    old ones if the loss needs any. vLLM has separate weights and kernels: with vLLM, or with any importance correction,
    the old log-probabilities are recomputed with the trained model, and the sampler's only enter the importance ratio.

    Attributes:
        correction: The importance correction for the sampler; None if it is off.
        needs_old: Whether updates use rollouts from earlier weights.
        needs_sampling: Whether the loss itself uses the sampler's log-probabilities.
        recorded_are_old: Whether the sampler's log-probabilities can serve as the old ones: all of them are known, and
            they were computed with the weights being trained.
        is_recorded: Whether the sampler returned log-probabilities on every rank.
        compares: Whether to compare the sampler's log-probabilities with the model's, even if the loss does not need
            the model's.
    """

    correction: ImportanceCorrection | None
    needs_old: bool
    needs_sampling: bool
    recorded_are_old: bool
    is_recorded: bool
    compares: bool

    @classmethod
    def of(
        cls, args: LogprobSettings, known: Collection[KnownLogprobs], *, is_trained_policy: bool, compares: bool
    ) -> Self:
        """Decide from the settings and from what the sampler recorded.

        Args:
            args: The settings.
            known: The values of :data:`KnownLogprobs` for the rollouts of all ranks.
            is_trained_policy: Whether the sampler used exactly the weights that are being trained.
            compares: See the attribute.
        """
        correction = args.importance_correction
        if correction is not None and "none" in known and not args.use_vllm:
            raise ConfigError(
                "vllm_importance_sampling_correction=True requires an agent that returns the log-probabilities of its "
                "tokens, but this agent does not"
            )
        return cls(
            correction=correction,
            needs_old=args.needs_old_logprobs,
            needs_sampling=args.off_policy_mask_threshold is not None,
            recorded_are_old=set(known) == {"all"} and is_trained_policy,
            is_recorded="none" not in known,
            compares=compares,
        )

    @property
    def needs_model(self) -> bool:
        """Whether the model has to score the batch."""
        needs_model_as_old = self.needs_old and not self.recorded_are_old
        return self.correction is not None or needs_model_as_old or (self.compares and self.is_recorded)


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


def token_logprobs(
    ids: torch.Tensor,
    attention_mask: torch.Tensor,
    mask: torch.Tensor,
    recorded: torch.Tensor | None,
    plan: LogprobPlan,
    score: Score,
) -> TokenLogprobs:
    """Compute only what the loss needs; the caller adds the reference log-probabilities.

    Args:
        ids: (B, L).
        attention_mask: (B, L).
        mask: (B, L), 1 on the agent tokens that are trained on.
        recorded: (B, L), log-probabilities from the sampler; None if it returned none.
        plan: The log-probabilities that are needed.
        score: Runs the model that is being trained.
    """
    recorded = recorded if plan.is_recorded else None
    model, entropies = score(ids, attention_mask, mask) if plan.needs_model else (None, None)
    correction = plan.correction
    old = model if correction is not None or not plan.recorded_are_old else recorded
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
        old=old if correction is not None or plan.needs_old else None,
        reference=None,
        sampling=recorded if plan.needs_sampling else None,
        importance_ratio=ratio,
        comparison=comparison,
        model=model,
        entropies=entropies,
    )
