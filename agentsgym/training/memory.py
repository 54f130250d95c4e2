"""Warn before a micro-batch exceeds a CPU's memory: the system would end the process without an error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch

from agentsgym.training.observing import BatchObserver
from agentsgym.training.tensors.shared_prefix import most_computed

if TYPE_CHECKING:
    from agentsgym.training.observing import ObservedBatch

_CGROUP = Path("/sys/fs/cgroup")
logger = logging.getLogger(__name__)


class MemoryWarning(BatchObserver):
    """Warns if the activations of the largest micro-batch may not fit in the memory of a CPU."""

    def __init__(self) -> None:
        self._num_rows = self._bytes_per_token = self._warned_at = 0
        self._shares = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Estimate the memory that a token needs."""
        self._shares = getattr(model, "packs_rows", False)
        self._num_rows = args.per_device_train_batch_size
        self._bytes_per_token = activation_bytes(model, is_half=args.bf16, recomputes=args.gradient_checkpointing)

    def on_batch(self, observed: ObservedBatch) -> None:
        """Compare the largest micro-batch with the free memory."""
        if not observed.phase.is_training or observed.tokens.ids.device.type != "cpu":
            return
        num_rows, length = self._num_rows, int(observed.tokens.attention_mask.sum(1).max())
        free = free_memory()

        def needed(size: int) -> int:
            padded = size * length * self._bytes_per_token
            if not self._shares or padded <= free:
                return padded
            return most_computed(observed.tokens.ids, observed.tokens.attention_mask, size) * self._bytes_per_token

        if needed(num_rows) <= max(free, self._warned_at):
            return
        self._warned_at = needed(num_rows)
        fitting = next((size for size in range(num_rows - 1, 0, -1) if needed(size) <= free), 0)
        advice = "a single row does not fit; set gradient_checkpointing=True or limit the length of episodes"
        if fitting:
            advice = f"per_device_train_batch_size={fitting} would fit (raise gradient_accumulation_steps in return)"
        logger.warning(
            "a micro-batch of %d rows of up to %d tokens needs about %.1f GB, but %.1f GB of memory are free, so the "
            "system may end the process: %s",
            num_rows,
            length,
            self._warned_at / 1e9,
            free / 1e9,
            advice,
        )


def activation_bytes(model: Any, *, is_half: bool, recomputes: bool) -> int:
    """Estimate the bytes per token that a forward pass keeps for the backward pass; 0 if the sizes are unknown.

    Per layer, a Llama with adapters on all linear layers keeps about 16 times its hidden size and 6 times its inner
    size, which matches the measured 1.1 MB per token of SmolLM2-135M in bfloat16. With recomputation, this is kept for
    a single layer, and the hidden states for all others.
    """
    config = model.config.get_text_config()
    config = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config
    layers, hidden = (getattr(config, name, None) or 0 for name in ("num_hidden_layers", "hidden_size"))
    inner: Any = getattr(config, "intermediate_size", None) or 0  # or a list with one for each layer, as in Gemma 3n
    kept = 16 * hidden + 6 * max(cast("list[int]", inner) if isinstance(inner, list) else [inner])
    size = 2 if is_half or model.dtype in (torch.bfloat16, torch.float16) else 4
    return size * (kept + layers * hidden if recomputes else layers * kept)


def free_memory() -> int:
    """Return the bytes that this process can still use, limited by its control group."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((_CGROUP / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return free
