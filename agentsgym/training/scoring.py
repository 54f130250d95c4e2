"""The log-probabilities that a batch is trained with, and how far the sampler's are from the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentsgym.errors import ConfigError
from agentsgym.training import _trl
from agentsgym.training.batches import Batch, recorded_logprobs
from agentsgym.training.correction import (
    cut_tokens,
    effective_sample_size,
    importance_sampling_ratio,
    row_log_ratios,
)
from agentsgym.training.drift import drift_metrics
from agentsgym.training.ranks import gathered
from agentsgym.training.rules import Correction, correction_of
from agentsgym.training.vllm_policy import VLLMPolicyAgent

if TYPE_CHECKING:
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a batch is trained with beside its tokens and advantages.

    Attributes:
        old: (B, L), log-probabilities by the weights that the ratio starts from; None where TRL takes the current ones.
        ref: (B, L), those of the reference model; None without KL term.
        sampling: (B, L), the sampler's own; None where nothing in the loss reads them.
        ratio: (B, L), the weight that the loss multiplies with to correct for the sampler; None for none.
        metrics: How far the sampler is from the model, over the rows of all ranks; empty where nothing was compared.
    """

    old: torch.Tensor | None
    ref: torch.Tensor | None
    sampling: torch.Tensor | None
    ratio: torch.Tensor | None
    metrics: dict[str, float]


def scores(
    trainer: GRPOEnvTrainer, trajectories: Sequence[Trajectory], batch: Batch, mask: torch.Tensor, *, with_drift: bool
) -> Scores:
    """Score what the loss needs, and no more.

    The policy on transformers samples from the weights that are trained, so that its log-probabilities are the old
    ones where the loss needs any. vLLM computes with weights and kernels of its own: there, and wherever a correction
    is asked for, the old ones are the model's, and the sampler's give the ratio that corrects for it.

    Args:
        trainer: Whose models, settings and agent it is.
        trajectories: This rank's rollouts.
        batch: Their rows.
        mask: (B, L), 1 on the agent tokens that count.
        with_drift: Whether the sampler's log-probabilities are to be compared with the model's.

    Raises:
        ConfigError: The sampler is to be corrected for, and does not tell its log-probabilities.
    """
    args = trainer.args
    recorded = recorded_logprobs(trajectories, batch)
    # They score together or not at all, so that all ranks decide on what all of them hold.
    known = gathered(["no" if recorded is None else "in part" if bool(recorded.isnan().any()) else "all"])
    if "no" in known:
        recorded = None
    correction, needs_old = correction_of(args), _trl.needs_old_logprobs(args)
    if correction is not None and recorded is None and not args.use_vllm:
        raise ConfigError(
            f"sampler_correction={args.sampler_correction!r} needs an agent that tells the log-probabilities of its "
            f"tokens, and {type(trainer.agent).__name__} does not"
        )
    records_old = set(known) == {"all"} and not isinstance(trainer.agent, VLLMPolicyAgent)
    own = None
    if correction is not None or (needs_old and not records_old) or (with_drift and recorded is not None):
        own = _trl.per_token_logps(trainer, trainer.model, batch.ids, batch.attention_mask, mask)
    old = own if correction is not None or not records_old else recorded
    return Scores(
        old=old if correction is not None or needs_old else None,
        ref=_reference(trainer, batch, mask),
        sampling=recorded if args.off_policy_mask_threshold is not None else None,
        ratio=None if own is None or correction is None else _ratio(own, recorded, mask, correction),
        metrics={} if own is None or recorded is None else _metrics(recorded, own, mask, correction),
    )


def _reference(trainer: GRPOEnvTrainer, batch: Batch, mask: torch.Tensor) -> torch.Tensor | None:
    if trainer.beta == 0.0:
        return None
    with _trl.reference_model(trainer) as reference:
        return _trl.per_token_logps(trainer, reference, batch.ids, batch.attention_mask, mask)


def _ratio(
    own: torch.Tensor, recorded: torch.Tensor | None, mask: torch.Tensor, correction: Correction
) -> torch.Tensor:
    return importance_sampling_ratio(own, own if recorded is None else recorded, mask, *correction)


def _metrics(
    recorded: torch.Tensor, own: torch.Tensor, mask: torch.Tensor, correction: Correction | None
) -> dict[str, float]:
    chosen = mask.bool()
    parts = gathered([(recorded[chosen].cpu(), own[chosen].cpu())])  # ranks differ in how many tokens they have
    pairs = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    metrics = drift_metrics(pairs[0], pairs[1], torch.ones_like(pairs[0]))
    metrics["sampling/effective_sample_size"] = effective_sample_size(gathered(row_log_ratios(own - recorded, mask)))
    if correction is not None:
        cut = sum(gathered([int(cut_tokens(own, recorded, mask, *correction).sum())]))
        metrics["sampling/cut_share"] = cut / max(1, len(pairs[0]))
    return metrics
