"""Compute the log-probabilities that a batch is trained with, and compare the sampler's with the model's."""

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
    """The settings that are read here; :class:`~agentsgym.training.config.GRPOEnvConfig` has them."""

    use_vllm: bool
    off_policy_mask_threshold: float | None

    @property
    def importance_correction(self) -> ImportanceCorrection | None:
        """The correction of the loss for the sampler; None for none."""
        ...

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether updates run on rollouts of earlier weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobPlan:
    """The log-probabilities that a batch needs, the same on all ranks.

    The policy on transformers samples from the weights that are trained, so its log-probabilities are the old ones
    where the loss needs any. vLLM has separate weights and kernels: there, and with any correction, the old ones are
    the model's, and the sampler's give the ratio that corrects for it.

    Attributes:
        correction: The correction of the loss for the sampler; None for none.
        needs_old: Whether updates run on rollouts of earlier weights.
        needs_sampling: Whether the loss itself reads the sampler's.
        recorded_are_old: Whether the sampler's can serve as the old ones: all are known, and they are those of the
            very weights that are trained.
        is_recorded: Whether the sampler gave log-probabilities on every rank.
        compares: Whether the sampler's are to be compared with the model's, whether or not the loss needs these.
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
            is_trained_policy: Whether these are those of the very weights that are trained.
            compares: As the attribute.

        Raises:
            ConfigError: A correction is set, and the sampler gives no log-probabilities.
        """
        correction = args.importance_correction
        if correction is not None and "none" in known and not args.use_vllm:
            raise ConfigError(
                "vllm_importance_sampling_correction=True needs an agent that returns the log-probabilities of its "
                "tokens, and this one does not"
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
    """The log-probabilities that a batch is trained with, and the weights that follow from them.

    Attributes:
        old: (B, L), log-probabilities by the weights that the ratio starts from; None where TRL takes the current ones.
        reference: (B, L), those of the reference model; None without KL term.
        sampling: (B, L), the sampler's own; None where nothing in the loss reads them.
        importance_ratio: (B, L), the weight that corrects for the sampler; None for none.
        comparison: Differences between sampler and model; None where they were not compared.
        model: (B, L), those of the weights that are trained; None where nothing needed them.
        entropies: (B, L), of the same model's distributions, in nats; None likewise.
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
    """Compute what the loss needs, and no more; the reference is added by the caller.

    Args:
        ids: (B, L).
        attention_mask: (B, L).
        mask: (B, L), 1 on the agent tokens that are trained on.
        recorded: (B, L), the sampler's; None if it gave none.
        plan: Which are needed.
        score: Runs the model in training.
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
