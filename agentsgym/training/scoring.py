"""The log-probabilities that a batch is trained with, and how far the sampler's are from the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentsgym.training import _trl
from agentsgym.training.batches import recorded_logprobs
from agentsgym.training.drift import drift_metrics
from agentsgym.training.ranks import gathered
from agentsgym.training.vllm_policy import VLLMPolicyAgent, importance_sampling_ratio

if TYPE_CHECKING:
    from agentsgym.training.trainer import GRPOEnvTrainer
    from agentsgym.types import Trajectory

Tensors = dict[str, torch.Tensor | None]


def scores(
    trainer: GRPOEnvTrainer, trajectories: Sequence[Trajectory], rows: dict[str, torch.Tensor], *, with_drift: bool
) -> tuple[Tensors, dict[str, float]]:
    """Score what the loss needs, and no more.

    The policy on transformers samples from the weights that are trained, so that its log-probabilities are the old
    ones where the loss needs any. vLLM computes with weights and kernels of its own: there the old ones are the
    model's, and the sampler's give the ratio that corrects for it (unless ``vllm_importance_sampling_correction`` is
    off).

    Args:
        trainer: Whose models, settings and agent it is.
        trajectories: This rank's rollouts, (B,).
        rows: Their tensors, from :func:`agentsgym.training.batches.row_tensors`.
        with_drift: Whether the sampler's log-probabilities are to be compared with the model's.

    Returns:
        ``old_per_token_logps``, ``ref_per_token_logps`` and ``importance_sampling_ratio``, each (B, L) or None; and the
        drift metrics, of the rows of all ranks, empty where nothing was compared.
    """
    ids, attention_mask, mask = (rows[name] for name in ("prompt_completion_ids", "attention_mask", "agent_token_mask"))
    recorded = recorded_logprobs(trajectories, rows["advantages"])
    # They score together or not at all, so that all ranks decide on what all of them hold.
    known = gathered(["no" if recorded is None else "in part" if bool(recorded.isnan().any()) else "all"])
    if "no" in known:
        recorded = None
    corrects = trainer.args.use_vllm and trainer.args.vllm_importance_sampling_correction
    needs_old = _trl.needs_old_logprobs(trainer.args)
    records_old = set(known) == {"all"} and not isinstance(trainer.agent, VLLMPolicyAgent)
    own = ratio = ref = None
    if corrects or (needs_old and not records_old) or (with_drift and recorded is not None):
        own = _trl.per_token_logps(trainer, trainer.model, ids, attention_mask, mask)
    if own is not None and corrects:
        ratio = _ratio(trainer.args, own, own if recorded is None else recorded, mask)
    if trainer.beta != 0.0:
        with _trl.reference_model(trainer) as reference:
            ref = _trl.per_token_logps(trainer, reference, ids, attention_mask, mask)
    old = own if corrects or not records_old else recorded
    tensors: Tensors = {
        "old_per_token_logps": old if corrects or needs_old else None,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": ratio,
    }
    return tensors, {} if own is None or recorded is None else _drift(recorded, own, mask)


def _drift(recorded: torch.Tensor, own: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    chosen = mask.bool()
    parts = gathered([(recorded[chosen].cpu(), own[chosen].cpu())])  # ranks differ in how many tokens they have
    recorded, own = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return drift_metrics(recorded, own, torch.ones_like(recorded))


def _ratio(args: Any, own: torch.Tensor, recorded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return importance_sampling_ratio(
        own,
        recorded,
        mask,
        args.vllm_importance_sampling_mode,
        args.vllm_importance_sampling_clip_min,
        args.vllm_importance_sampling_clip_max,
    )
