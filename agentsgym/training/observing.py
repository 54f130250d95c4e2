"""Let callbacks observe generation batches, so that the trainer does not depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from agentsgym._lazy import deferred
from agentsgym.fields import Check, are_numbers, has_str_keys, require

if TYPE_CHECKING:
    import torch

    from agentsgym.credit.assignment import TokenAdvantages
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.envs.datasets.environments import Environments
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.training.generation.batch import GenerationBatch, Phase
    from agentsgym.training.tensors.logprobs import TokenLogprobs
    from agentsgym.training.tensors.token_batch import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedBatch:
    """A generation batch with everything that the loss is computed from.

    Attributes:
        batch: The rollouts.
        phase: Their purpose.
        tokens: Their rows.
        mask: (B, L), 1 on the agent tokens that are trained on.
        advantages: One number a token of each rollout.
        logprobs: The trained model's log-probabilities and entropies, where they were computed.
    """

    batch: GenerationBatch
    phase: Phase
    tokens: TokenBatch
    mask: torch.Tensor
    advantages: TokenAdvantages
    logprobs: TokenLogprobs


class BatchObserver(TrainerCallback):
    """A callback that receives every generation batch too, in training and in evaluation.

    Attributes:
        metrics: Numbers to log with the next training batch, the same on all ranks.
    """

    metrics: Mapping[str, float] = MappingProxyType({})

    def training(self, step: int | None) -> AbstractContextManager[None]:
        """Collective: what a training is enclosed in; ``step`` is that of the checkpoint, None for a new run."""
        return contextlib.nullcontext()

    def on_batch(self, observed: ObservedBatch) -> None:
        """Collective: receive a batch before it is trained on."""

    def flush(self) -> None:
        """Write pending data at the end of a training or an evaluation, also after an error."""

    def close(self) -> None:
        """Release resources, at the end of the trainer."""


_show_conversations = deferred("agentsgym.observers.shown", "ShownConversations")
_store_rollouts = deferred("agentsgym.observers.stored", "TrainingStore")


def build_observers(args: GRPOEnvConfig, environments: Environments, estimator: BoundEstimator) -> list[BatchObserver]:
    """Build the observers that the settings name; the modules of the others are not imported."""
    observers: list[BatchObserver] = []
    if args.log_conversations:
        observers.append(_show_conversations(args))
    if args.rollout_folder is not None:
        observers.append(_store_rollouts(args.rollout_folder, args, environments, estimator))
    return observers


def checked_metrics(observer: BatchObserver) -> Mapping[str, float]:
    """Return the metrics of an observer; raise :class:`ConfigError` if they cannot be logged."""
    valid: Check = lambda given: has_str_keys(given) and are_numbers([*given.values()])  # noqa: E731
    require(f"{type(observer).__name__}.metrics", observer.metrics, valid, "a dict of numbers by name")
    return observer.metrics


@contextlib.contextmanager
def flushing(observers: Sequence[BatchObserver]) -> Generator[None]:
    """Flush the observers at the end, also after an error."""
    try:
        yield
    finally:
        for observer in observers:
            observer.flush()
