"""What differs between the supported versions of transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

#: The setting that recomputes activations in the backward pass; from 5.23 on, ``gradient_checkpointing`` is deprecated.
RECOMPUTATION = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)


def recompute_by_default(args: Any, *, is_recomputed: bool) -> None:
    """Set whether activations are recomputed, unless a user did under the setting's new or old name."""
    if getattr(args, RECOMPUTATION) is None and args.gradient_checkpointing is None:
        setattr(args, RECOMPUTATION, is_recomputed)
