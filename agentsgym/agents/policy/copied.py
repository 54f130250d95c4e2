"""Sample the policy in training from a copy of its weights, which is updated only between turns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.policy.vocabulary import check_is_model
from agentsgym.agents.trained import BatchStart
from agentsgym.errors import AgentError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentsgym.types import Action, TurnRequest


class CopiedPolicyAgent(PolicyAgent):
    """A :class:`PolicyAgent` that samples from a copy of the model, whose weights are updated between turns.

    It is meant for asynchronous training (``max_staleness``) without vLLM, on a second device or with small models.
    Every turn, including its history, is computed by one version of the weights.
    """

    logprobs_match_trained_weights = False
    samples_during_updates = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: str | torch.device | None = None,
        **settings: Any,
    ) -> None:
        """Copy the model; nothing is run.

        Args:
            model: The model to be trained: the same object that is passed to the trainer.
            tokenizer: The model's tokenizer.
            device: The copy's device; None for the device of the model.
            **settings: See :class:`PolicyAgent`.
        """
        check_is_model(model, "CopiedPolicyAgent(model, tokenizer)")
        copied = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()
        super().__init__(copied if device is None else copied.to(device), tokenizer, **settings)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]  # torch's `to`
        self._trained, self._copied_step = model, -1
        self._lock = threading.Lock()

    def prepare(self, start: BatchStart) -> None:
        """Copy the weights if they have changed, once no turn is being sampled.

        Raises:
            ConfigError: The trained model's parameters differ in number or shape from the copy's, for example after
                adapters were added or the weights were sharded.
        """
        with self._lock:
            super().prepare(start)
            if start.step == self._copied_step:
                return
            copies, originals = ([*model.parameters(), *model.buffers()] for model in (self.model, self._trained))
            is_sharded = any(hasattr(tensor, "full_tensor") for tensor in originals)
            if is_sharded or [tensor.shape for tensor in copies] != [tensor.shape for tensor in originals]:
                raise ConfigError(
                    "CopiedPolicyAgent cannot copy the weights: parameters were added, reshaped or sharded after the "
                    "model was passed. With adapters, pass the PeftModel itself to agent and trainer, without "
                    "peft_config; with sharded weights, sample with a vLLM server"
                )
            with torch.no_grad():
                for copied, original in zip(copies, originals, strict=True):
                    copied.copy_(original)
            self._copied_step = start.step

    def weights_changed(self) -> None:
        """Copy the weights at the next :meth:`prepare`, even if its step has not changed."""
        self._copied_step = -1

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Sample one turn of every session; can be called from any thread."""
        with self._lock:
            return super().act(requests)
